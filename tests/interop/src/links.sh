#!/bin/sh
# links.sh LINK BACKEND: two network namespaces of the guest with the named link between them, and
# RDMA over it. Prints `works N` (Mbit/s of WRITEs; every byte of a ping-pong was right), or
# `refused: WHY`; and then what the host counted.
link=$1 backend=$2 rocinante=/host/rocinante interop=/host/rocinante-interop
a=a$$ b=b$$ h=h$$ held=
peer=10.7.0.2
at() { local at=$1; shift; ip netns exec "$at" "$@"; }
end() { if [ "$held" ]; then kill $held; fi; for ns in $a $b $h; do ip netns del $ns 2>/dev/null; done; }
trap end EXIT
for ns in $a $b $h; do ip netns add $ns; ip -n $ns link set lo up; done

# addressed NAMESPACE DEVICE LAST
addressed() { ip -n "$1" address add "10.7.0.$3/24" dev "$2"; ip -n "$1" link set "$2" up; }
# veth NAMESPACE DEVICE NAMESPACE DEVICE: a pair. The names may be those of interfaces here.
veth() {
    ip link add x0 type veth peer name x1
    ip link set x0 netns "$1" name "$2"; ip link set x1 netns "$3" name "$4"
}
# underlay: a veth between both, without the host.
underlay() {
    veth $a v0 $b v0
    ip -n $a address add 10.8.0.1/24 dev v0; ip -n $b address add 10.8.0.2/24 dev v0
    ip -n $a link set v0 up; ip -n $b link set v0 up
}
# bridged: a veth for each, and a bridge of the host.
bridged() {
    ip -n $h link add br0 type bridge; ip -n $h link set br0 up
    veth $a eth0 $h toa; veth $b eth0 $h tob
    for side in a b; do ip -n $h link set to$side master br0 up; done
    addressed $a eth0 1; addressed $b eth0 2
}
# parent: the host has an uplink, which ends at the other namespace.
parent() {
    veth $h up0 $b eth0
    ip -n $h link set up0 up
    addressed $b eth0 2
}
# secured MODE N: a veth between both, and ESP from 10.N.0.1 to 10.N.0.2 for 10.7.0.1 and 10.7.0.2.
secured() {
    mode=$1 net=$2
    veth $a eth0 $b eth0
    addressed $a eth0 1; addressed $b eth0 2
    key=0x0123456789abcdef0123456789abcdef01234567
    for ns in $a $b; do
        for way in "10.$net.0.1 dst 10.$net.0.2 proto esp spi 1" "10.$net.0.2 dst 10.$net.0.1 proto esp spi 2"; do
            ip -n $ns xfrm state add src $way reqid 1 mode $mode aead 'rfc4106(gcm(aes))' $key 128 || exit
        done
    done
    policy $a 1 2 out; policy $a 2 1 in; policy $b 2 1 out; policy $b 1 2 in
}
# policy NAMESPACE FROM TO DIRECTION
policy() {
    ip -n $1 xfrm policy add src 10.7.0.$2 dst 10.7.0.$3 dir $4 \
        tmpl src 10.$net.0.$2 dst 10.$net.0.$3 proto esp reqid 1 mode $mode
}
# The packets that came to the second namespace by ESP.
decrypted() {
    ip -n $b -s xfrm state | awk '/dst 10.[78].0.2/ { mine = 1 } /dst 10.[78].0.1/ { mine = 0 }
        mine && /\(packets\)/ { sub(/.*, */, ""); sum += $0 + 0 } END { print sum + 0 }'
}
# What the host counted of RoCEv2, or held back.
counted() {
    at $h nft list table netdev t 2>/dev/null | sed -n 's/.*counter packets \([0-9]*\).*/counted \1/p'
    case $link in
    fq | edt) at $h tc -s qdisc show dev tob | sed -n 's/.*throttled \([0-9]*\).*/counted \1/p' | tail -n 1 ;;
    police) at $h tc -s filter show dev toa ingress | sed -n 's/.*dropped \([0-9]*\),.*/counted \1/p' ;;
    # What arrived encrypted: bytes, and packets.
    wireguard) at $b wg show wg0 transfer | awk '{ print "counted", $2 }' ;;
    ipsec | ipsec-tunnel) echo "counted $(($(decrypted) - pings))" ;;
    esac
}

case $link in
bridged) bridged ;;
fq) bridged; at $h tc qdisc add dev tob root fq maxrate 10mbit flow_limit 1000 || exit ;;
edt)
    bridged
    at $h tc qdisc add dev tob root fq flow_limit 1000 || exit
    # 10 Mbit/s.
    ip netns exec $h $interop departures tob 800 >/tmp/said.$a &
    held=$!
    for try in 1 2 3 4 5 6 7 8; do grep -q attached /tmp/said.$a && break; sleep 1; done
    ;;
police)
    bridged
    at $h tc qdisc add dev toa ingress
    at $h tc filter add dev toa ingress matchall action police rate 10mbit burst 128k drop || exit
    ;;
ipvlan-l2 | ipvlan-l3)
    parent
    ip -n $h link add ipvl link up0 type ipvlan mode "${link#ipvlan-}" || exit
    ip -n $h link set ipvl netns $a name eth0
    addressed $a eth0 1
    # In mode L3 nobody answers for the container's address.
    mac=$(ip -n $h -o link show up0 | sed -n 's/.*link.ether \([^ ]*\).*/\1/p')
    ip -n $b neighbour replace 10.7.0.1 lladdr "$mac" dev eth0
    at $h nft "table netdev t { chain c { type filter hook egress device up0 priority 0; udp dport 4791 counter; }; }"
    ;;
netkit)
    # This iproute2 makes pairs of mode L3 only: without an Ethernet header.
    # It names the other end nk0.
    ip -n $h link add host0 type netkit || exit
    ip -n $h link set nk0 netns $a name eth0
    parent
    addressed $a eth0 1
    ip -n $h link set host0 up
    echo 1 >/proc/sys/net/ipv4/ip_forward
    at $h sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.proxy_arp=1
    at $h ip route add 10.7.0.1/32 dev host0; at $h ip route add 10.7.0.2/32 dev up0
    at $a ip route replace 10.7.0.2/32 dev eth0
    at $h nft "table netdev t { chain c { type filter hook ingress device host0 priority 0; udp dport 4791 counter; }; }"
    ;;
netkit-l2)
    ip -n $h link add br0 type bridge; ip -n $h link set br0 up
    for side in a b; do
        eval ns=\$$side
        at $h $interop netkit-l2 to$side nk$side || exit
        ip -n $h link set nk$side netns $ns name eth0
        ip -n $h link set to$side master br0 up
    done
    addressed $a eth0 1; addressed $b eth0 2
    at $h nft "table netdev t { chain c { type filter hook ingress device toa priority 0; udp dport 4791 counter; }; }"
    ;;
wireguard)
    underlay
    for side in a b; do
        eval ns=\$$side
        (umask 077; wg genkey >/tmp/key.$ns)
        ip -n $ns link add wg0 mtu 1420 type wireguard || exit
    done
    at $a wg set wg0 private-key /tmp/key.$a listen-port 51820 peer "$(wg pubkey </tmp/key.$b)" \
        allowed-ips 10.7.0.2/32 endpoint 10.8.0.2:51820
    at $b wg set wg0 private-key /tmp/key.$b listen-port 51820 peer "$(wg pubkey </tmp/key.$a)" \
        allowed-ips 10.7.0.1/32 endpoint 10.8.0.1:51820
    rm -f /tmp/key.$a /tmp/key.$b
    addressed $a wg0 1; addressed $b wg0 2
    ;;
ipsec) secured transport 7 ;;
# Of one device: the addresses that the program uses, and those that the tunnel has.
ipsec-tunnel)
    secured tunnel 8
    ip -n $a address add 10.8.0.1/24 dev eth0; ip -n $b address add 10.8.0.2/24 dev eth0
    ;;
*) echo "no such link: $link"; exit 2 ;;
esac

# Until the other side answers: addresses of IPv6 and handshakes take a moment.
for try in 1 2 3 4 5 6 7 8; do at $a ping -c 1 -W 1 $peer >/dev/null && break; done
case $link in ipsec*) pings=$(decrypted) ;; esac

run() { command=$1 said=$2; shift 2
    at $b timeout 60 $rocinante $command --netdev "$backend" "$@" >/tmp/server.$a 2>&1 &
    server=$!
    sleep 1
    at $a timeout 60 $rocinante $command --netdev "$backend" "$@" $peer >"$said" 2>&1
    status=$?
    if [ $status != 0 ]; then kill $server 2>/dev/null; fi
    wait $server
    [ $status = 0 ]
}
if ! run pingpong /tmp/said.$a -c -n 200 -s 4000; then
    echo "refused: $(grep -hv '^ *$' /tmp/said.$a | tail -n 2 | tr '\n' ' ')"
elif run "perf write-bw" /tmp/said.$a -s 65536 -D 3; then
    echo "works $(sed -n 's/^ 65536 *[0-9]* *[0-9.]* *\([0-9.]*\) .*/\1/p' /tmp/said.$a)"
else
    echo "refused: $(tail -n 2 /tmp/said.$a | tr '\n' ' ')"
fi
sed -n 's/^device .*/server: &/p' /tmp/server.$a | tail -n 1
counted
rm -f /tmp/said.$a /tmp/server.$a
