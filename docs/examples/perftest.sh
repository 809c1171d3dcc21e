#!/bin/sh
# RDMA programs as Debian ships them, server and client on one address, without any privilege. It
# fails if a program fails, or if its figures are missing.
#
#     perftest.sh FOLDER        # of an archive of Rocinante: rocinante and its libraries
#
# It needs the packages perftest and ibverbs-utils, and no network but loopback. It may be PID 1.
set -eu

rocinante=${1:?the folder of an archive of Rocinante}/rocinante
address=127.0.0.1
results=$(mktemp -d)
server=
end() {
    status=$?
    trap - EXIT
    if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi
    rm -rf "$results"
    exit "$status"
}
trap end EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# both PROGRAM [OPTION]...: runs a server and its client. Both have a minute.
both() {
    echo "== $*"
    # It is shown even if the server has not begun.
    : >"$results/server"
    timeout 60 "$rocinante" run --netdev udp -- "$@" >"$results/server" 2>&1 &
    server=$!
    # Until the server listens, a client is refused.
    tries=50
    until timeout 60 "$rocinante" run --netdev udp -- "$@" "$address" >"$results/client" 2>&1; do
        tries=$((tries - 1))
        if [ "$tries" = 0 ] || ! grep -q "Couldn't connect" "$results/client"; then
            cat "$results/server" "$results/client"
            echo "$1: the client failed" >&2
            exit 1
        fi
        sleep 0.1
    done
    ended=0
    wait "$server" || ended=$?
    server=
    cat "$results/client"
    if [ "$ended" != 0 ]; then
        cat "$results/server"
        echo "$1: the server failed with status $ended" >&2
        exit 1
    fi
}

# figure NAME COLUMN SIZE: prints the figure in the row of this message size, which must be more
# than 0.
figure() {
    awk -v name="$1" -v column="$2" -v size="$3" '
        $1 == size && $column + 0 > 0 { print name ": " $column; found = 1 }
        END { exit !found }
    ' "$results/client" || { echo "no $1 in what the client printed" >&2; exit 1; }
}

# -u 18: a machine of a CI may leave a process without a processor for longer than eight times 67 ms,
# which is how long a peer waits else.
both ib_write_bw -u 18
figure "ib_write_bw, MB/s" 4 65536

both ib_send_lat -u 18
figure "ib_send_lat, us" 5 2

# It compares every byte, and says what is wrong with its status 0.
both ibv_rc_pingpong -g 0 -c
if grep -q "invalid data" "$results/server" "$results/client"; then
    echo "ibv_rc_pingpong: other bytes came than were sent" >&2
    exit 1
fi
grep "1000 iters" "$results/client" || { echo "no figures of ibv_rc_pingpong" >&2; exit 1; }
echo "all of it ran"
