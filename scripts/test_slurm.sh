#!/bin/bash
# Run tests/suites/slurm against a real Slurm on this machine: `make test-slurm`.
#
# Everything is in namespaces of its own. Network traffic stays on their loopback interface, files of
# munge and /etc/hosts are mounted over, and no daemon outlives the last process of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")

missing=()
for program in slurmctld slurmd munged ip unshare setpriv; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "test-slurm needs ${missing[*]}: apt-get install -y --no-install-recommends slurm-wlm munge iproute2" >&2
    exit 2
fi
if [ "$(id -u)" != 0 ]; then
    echo "test-slurm needs root, for namespaces and the daemons of Slurm: run it in a container" >&2
    exit 2
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export SCRATCH=$scratch SPARSEPRETRAIN_TEST_SLURM=$scratch PYTHON=$python
unshare --net --mount --pid --fork --kill-child --mount-proc bash -euo pipefail -c '
    ip link set lo up
    # getaddrinfo with AI_ADDRCONFIG, which Slurm asks, resolves nothing if all addresses are 127.*
    ip address add 10.77.0.1/32 dev lo
    for directory in /etc/munge /run/munge /var/log/munge /var/lib/munge; do
        mkdir -p "$directory"
        mount -t tmpfs tmpfs "$directory"
    done
    cp /etc/hosts "$SCRATCH/hosts"
    printf "127.0.0.1 n1\n127.0.0.1 n2\n" >> "$SCRATCH/hosts"
    mount --bind "$SCRATCH/hosts" /etc/hosts
    OMP_NUM_THREADS=1 PYTHONHASHSEED=0 "$PYTHON" -m pytest -m slurm tests/suites/slurm --durations=0 "$@"
' bash "$@"
