"""Data: text becomes token files once, and training reads them as memory maps.

data = preparation.load(options)            # prepares offline sources on first use
train = order.windows(data, "train", length=128, seed=0)
batch = train.batch(step, range(16), 16)    # (16, 129) int64
"""
