#!/bin/sh
# vrf.sh BACKEND: a namespace with three interfaces of the same addresses: in no VRF, and in one
# each. Each has a peer of its own, and the peers have the same addresses. Programs find the device
# of their VRF, and nothing comes to another's. Ends with the first step that fails.
backend=$1 a=va$$ dir=/tmp/vrf$$
end() { for ns in $a ${a}0 ${a}1 ${a}2; do ip netns del $ns; done; umount $dir/rocinante; rm -rf $dir; }
modprobe -a vrf veth || exit
mkdir $dir
trap end EXIT
# `run` finds the libraries beside the program.
touch $dir/rocinante
mount --bind /host/rocinante-under-interop $dir/rocinante || exit
for lib in ibverbs paths; do
    file=$(ls /host/deps/librocinante_$lib.so /host/librocinante_$lib.so 2>/dev/null | head -n 1)
    ln -s "$file" $dir/librocinante_$lib.so
done
ip netns add $a
ip -n $a link set lo up
# Addresses of no VRF are found behind those of VRFs (Documentation/networking/vrf.rst).
for family in -4 -6; do
    ip -n $a $family rule add pref 32765 lookup local
    ip -n $a $family rule del pref 0
done
for n in 0 1 2; do
    ip netns add $a$n
    ip -n $a$n link set lo up
    ip link add v$n mtu 4200 netns $a type veth peer name v0 mtu 4200 netns $a$n || exit
    if [ $n != 0 ]; then
        ip -n $a link add vrf$n type vrf table 10$n || exit
        ip -n $a link set vrf$n up
        ip -n $a link set v$n master vrf$n
    fi
    for end in "$a v$n 1" "$a$n v0 2"; do
        set -- $end
        ip -n $1 link set $2 up
        ip -n $1 address add 10.9.0.$3/24 dev $2
        ip -n $1 -6 address add fd09::$3/64 dev $2 nodad
    done
done
# near N COMMAND: in the VRF of this number, 0 is none. far N COMMAND: at its peer.
near() { n=$1; shift; if [ $n = 0 ]; then ip netns exec $a "$@"; else ip netns exec $a ip vrf exec vrf$n "$@"; fi; }
far() { n=$1; shift; ip netns exec $a$n "$@"; }
failed() { echo "failed: $*"; tail -n 6 $dir/s? $dir/c?; exit 1; }
# listening FILE: until the server has said so.
listening() { for try in $(seq 200); do grep -q waiting $1 && return; sleep 0.1; done; failed "$1 does not listen"; }
# each STEP SERVER'S-SIDE CLIENT'S-SIDE SERVER CLIENT: all servers at once, and a client for each.
each() {
    step=$1 servers=
    for n in 0 1 2; do $2 $n timeout 60 $4 >$dir/s$n 2>&1 & servers="$servers $!"; done
    case $4 in *pingpong*) for n in 0 1 2; do listening $dir/s$n; done ;; *) sleep 3 ;; esac
    for n in 0 1 2; do $3 $n timeout 30 $5 >$dir/c$n 2>&1 || failed "$step, VRF $n"; done
    for pid in $servers; do wait $pid || failed "$step: a server"; done
    case $2$4 in near*pingpong*) at=s ;; far*pingpong*) at=c ;; *) at= ;; esac
    for n in ${at:+0 1 2}; do grep -q "^device v$n at" $dir/$at$n || failed "$step: another device"; done
    echo "$step: ok"
}
roc=$dir/rocinante
ours="--netdev $backend" theirs="--netdev udp"
export ROCINANTE_NETDEV=$backend
for address in 10.9.0 fd09:; do
    own=$address.1 peer=$address.2
    case $address in *:) own=$address:1 peer=$address:2 ;; esac
    each "a server at $own" near far "$roc pingpong -e $ours --bind $own -c -n 20" "$roc pingpong -e $theirs -c -n 20 $own"
    each "a client of $peer" far near "$roc pingpong -e $theirs --bind $peer -c -n 20" "$roc pingpong -e $ours -c -n 20 $peer"
    each "both ends at $own" near near "$roc pingpong -e $ours --bind $own -c -n 20" "$roc pingpong -e $ours -c -n 20 $own"
done
each "rping's server" near far "$roc run -- rping -s -a 10.9.0.1 -V -C 3" "$roc run -- rping -c -a 10.9.0.1 -V -C 3"
each "rping's client" far near "$roc run -- rping -s -a 10.9.0.2 -V -C 3" "$roc run -- rping -c -a 10.9.0.2 -V -C 3"
