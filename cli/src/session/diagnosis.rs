//! Explains broken connections to the user.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use rocinante::stats::DeviceCounters;
use rocinante::verbs::Mtu;
use rocinante::{Context, WcStatus};
use rocinante_netdev::{ROCE_PORT, auto};
use rustix::net::sockopt;

use crate::output::{Failure, Kind};

/// The largest payload of a packet that every link takes: that of an MTU of 1500.
const USUAL: u32 = 1024;

/// The largest payload, in bytes, of the packets that were sent to a peer or asked of it, if not
/// one of that size has passed; else 0.
pub type Unanswered = u32;

/// The part of the default ACK timeouts from which on a device without a processor is named.
const STARVED_US: u64 = 50_000;

/// The payload of the largest packets of messages of `size` bytes, if none of them has passed.
#[must_use]
pub fn unanswered(size: usize, mtu: Option<Mtu>, passed: bool) -> Unanswered {
    let size = u32::try_from(size).unwrap_or(u32::MAX);
    if passed { 0 } else { mtu.map_or(0, |mtu| size.min(mtu.bytes())) }
}

/// The reason why a request to `peer` ended in `status`, as far as the device's counters tell.
#[must_use]
pub fn of_status(ctx: &Context, peer: IpAddr, status: WcStatus, unanswered: Unanswered) -> Failure {
    let why = match status {
        WcStatus::RetryExcErr => silent(ctx, peer, unanswered) + &carried(ctx),
        _ => explain(&ctx.counters(), peer, status),
    };
    Failure::Of(Kind::Completion(status), format!("{why} ({status})"))
}

/// The reason why nothing came from `peer` within `patience`, as far as the device's counters tell.
#[must_use]
pub fn of_silence(
    ctx: &Context,
    peer: IpAddr,
    patience: Duration,
    unanswered: Unanswered,
) -> Failure {
    let why = silent(ctx, peer, unanswered) + &carried(ctx);
    let text = format!("nothing came of {peer} within {} s: {why}", patience.as_secs());
    Failure::Of(Kind::Silence, text)
}

/// The cause in the own interface, if there is one, to follow another.
fn carried(ctx: &Context) -> String {
    auto::carried_by_program(ctx.name()).map_or_else(String::new, |cause| format!("; {cause}"))
}

/// The reason why `peer` may have ended the connection itself: of packets that were sent to it, not
/// one of the largest has passed.
#[must_use]
pub fn of_parting(ctx: &Context, peer: IpAddr, unanswered: Unanswered) -> Option<String> {
    (unanswered > USUAL).then(|| silent(ctx, peer, unanswered))
}

fn silent(ctx: &Context, peer: IpAddr, unanswered: Unanswered) -> String {
    silence(&ctx.counters(), peer, unanswered, path_mtu(peer))
}

/// The MTU of the path to a peer as far as the kernel knows it: that of the interface or a route,
/// or less, which a router on the way reported (`IP_MTU` in ip(7)).
fn path_mtu(peer: IpAddr) -> Option<u32> {
    let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((peer, ROCE_PORT)).ok()?;
    if peer.is_ipv4() { sockopt::ip_mtu(&socket) } else { sockopt::ipv6_mtu(&socket) }.ok()
}

fn explain(counters: &DeviceCounters, peer: IpAddr, status: WcStatus) -> String {
    match status {
        WcStatus::RnrRetryExcErr => {
            format!("{peer} answers, but posted no receive in time: is its program still running?")
        }
        WcStatus::RemAccessErr => format!(
            "{peer} refused the access: it permits neither this operation nor this range of its memory"
        ),
        WcStatus::RemInvReqErr => format!(
            "{peer} refused the request as invalid: give both sides the same size, path MTU and options"
        ),
        WcStatus::RemOpErr => format!("{peer} could not complete the request"),
        WcStatus::LocLenErr => {
            format!(
                "a message from {peer} was longer than the receive: give both sides the same size"
            )
        }
        WcStatus::WrFlushErr => broken(counters, peer),
        _ => format!("a request to {peer} failed"),
    }
}

/// Explains a connection that broke while this side waited.
fn broken(counters: &DeviceCounters, peer: IpAddr) -> String {
    if counters.transport.remote_invalid_request > 0 {
        format!(
            "a request of {peer} was invalid, and ended the connection: give both sides the same size, path MTU and options"
        )
    } else if counters.transport.remote_access_errors > 0 {
        format!(
            "{peer} asked for an access that this side does not permit, and ended the connection"
        )
    } else {
        format!("the connection to {peer} broke, and this request with it")
    }
}

/// Explains why a peer does not answer. `path` is the MTU of the path, if it is known.
fn silence(
    counters: &DeviceCounters,
    peer: IpAddr,
    unanswered: Unanswered,
    path: Option<u32>,
) -> String {
    let large = unanswered > USUAL;
    let fits = path.and_then(|mtu| Some((mtu, Mtu::for_link(mtu)?.bytes())));
    let (refused, errno) = counters.refused;
    let dropped: Vec<String> = counters
        .drops
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(reason, count)| format!("{count} for {}", reason.replace('_', " ")))
        .collect();
    if refused > 0 && errno == libc::EPERM {
        format!(
            "the kernel refused to send {refused} packets to {peer}: a rule of this network namespace forbids it: check \
             `nft list ruleset` for UDP/4791 in output and postrouting"
        )
    } else if let Some((mtu, fits)) = fits.filter(|(_, fits)| large && *fits < unanswered) {
        format!(
            "the path to {peer} has an MTU of {mtu}, by a router's ICMP or a route (`ip route get {peer}`), less than the \
             interface's: packets with {unanswered} bytes of payload do not pass: try -m {fits}, or raise the MTU there"
        )
    } else if counters.port.rx_datagrams == 0 && large {
        format!(
            "no reply on UDP/4791 from {peer}: check the firewall between, and whether each link between takes packets with \
             {unanswered} bytes of payload: try -m {USUAL}"
        )
    } else if counters.port.rx_datagrams == 0 {
        format!("no reply on UDP/4791 from {peer}: check the firewall between")
    } else if counters.transport.rcvd_pkts == 0 {
        format!(
            "packets on UDP/4791 arrive, but none that the connection to {peer} can use: dropped {}: is there NAT, or another \
             sender, between?",
            dropped.join(", ")
        )
    } else if large {
        format!(
            "{peer} answered on UDP/4791, but not one packet with {unanswered} bytes of payload has passed: a link between has a \
             smaller MTU than those of both ends, as a bridge's port may: try -m {USUAL}, or raise it; or its program has ended"
        )
    } else if let Some(time) = starved(counters) {
        format!(
            "{peer} did not answer in time on UDP/4791, and {} ms of that time this side was not driven, as its process got \
             no processor: give both sides more of it, or a longer ACK timeout (-u 18 of perf); or the peer's program has ended",
            time.as_millis()
        )
    } else {
        format!(
            "{peer} stopped answering on UDP/4791: its program has ended, or the firewall between lets packets through \
             in one direction only, or no longer"
        )
    }
}

/// How long this side was not driven while it waited for a peer that it gave up.
fn starved(counters: &DeviceCounters) -> Option<Duration> {
    let transport = &counters.transport;
    let us = transport.retry_exceeded_undriven_us.checked_div(transport.retry_exceeded_err)?;
    (us >= STARVED_US).then(|| Duration::from_micros(us))
}

/// The translation between, if a peer reports another address than that by which it is seen.
#[must_use]
pub fn translated(claimed: IpAddr, seen: IpAddr) -> Option<String> {
    let seen = seen.to_canonical();
    (claimed != seen).then(|| {
        format!(
            "the peer says that it is at {claimed}, but is seen at {seen} over TCP: something between translates addresses (NAT, \
             slirp, `docker -p`), and RoCE does not pass that: use a network on which both sides have their own addresses, or, if \
             the peer has both addresses, give --bind"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_by_which_a_peer_is_not_seen_is_translated() {
        let [own, host, mapped]: [IpAddr; 3] =
            ["10.0.2.15", "192.0.2.1", "::ffff:10.0.2.15"].map(|text| text.parse().unwrap());
        for same in [own, mapped] {
            assert_eq!(translated(own, same), None, "{same}");
        }
        let why = translated(own, host).unwrap();
        assert!(why.contains("at 10.0.2.15, but is seen at 192.0.2.1") && why.contains("NAT"));
        let [zone, v6]: [IpAddr; 2] = ["fe80::1", "fd00::1"].map(|text| text.parse().unwrap());
        assert!(translated(zone, v6).is_some() && translated(v6, v6).is_none());
    }

    #[test]
    fn silence_has_a_cause() {
        let peer = IpAddr::from([10, 0, 0, 2]);
        let at = |counters: &DeviceCounters, large| silence(counters, peer, large, Some(9000));
        let explained = |counters: &DeviceCounters| at(counters, USUAL);
        let mut c = DeviceCounters::default();
        assert_eq!(explained(&c), "no reply on UDP/4791 from 10.0.0.2: check the firewall between");
        c.refused = (3, libc::EPERM);
        assert!(explained(&c).contains("refused to send 3 packets"), "{}", explained(&c));
        c.refused = (0, 0);
        c.port.rx_datagrams = 5;
        c.drops.wrong_source = 5;
        assert!(explained(&c).contains("dropped 5 for wrong source"), "{}", explained(&c));
        c.transport.rcvd_pkts = 9;
        assert!(explained(&c).contains("stopped answering"), "{}", explained(&c));
        (c.transport.retry_exceeded_err, c.transport.retry_exceeded_undriven_us) = (2, 99_000);
        assert!(explained(&c).contains("stopped answering"), "{}", explained(&c));
        c.transport.retry_exceeded_undriven_us = 800_000;
        let starved = explained(&c);
        assert!(starved.contains("400 ms") && starved.contains("-u 18"), "{starved}");
        for received in [0, 9] {
            c.port.rx_datagrams = received;
            let text = at(&c, 4096);
            assert!(text.contains("4096 bytes of payload") && text.contains("-m 1024"), "{text}");
            let text = silence(&c, peer, 4096, Some(2500));
            assert!(text.contains("MTU of 2500") && text.contains("-m 2048"), "{text}");
            assert!(!silence(&c, peer, 2048, Some(2500)).contains("2500"), "it fits");
        }
    }

    #[test]
    fn the_largest_packet_is_a_full_one_or_the_message() {
        let mtu = Some(Mtu::Mtu4096);
        assert_eq!([2000, 5000].map(|size| unanswered(size, mtu, false)), [2000, 4096]);
        assert_eq!([unanswered(5000, mtu, true), unanswered(5000, None, false)], [0, 0]);
    }

    #[test]
    fn a_connection_that_a_peer_broke_says_so() {
        let peer = IpAddr::from([10, 0, 0, 2]);
        let explained = |counters: &DeviceCounters| explain(counters, peer, WcStatus::WrFlushErr);
        let mut c = DeviceCounters::default();
        assert!(explained(&c).contains("broke"), "{}", explained(&c));
        c.transport.remote_access_errors = 1;
        assert!(explained(&c).contains("does not permit"), "{}", explained(&c));
        c.transport.remote_invalid_request = 1;
        assert!(explained(&c).contains("path MTU"), "{}", explained(&c));
    }
}
