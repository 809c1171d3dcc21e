//! Explains broken connections to the user.

use std::net::IpAddr;
use std::time::Duration;

use rocinante::{Context, DeviceCounters, WcStatus};

use crate::output::{Failure, Kind};

/// The reason why a request to `peer` ended in `status`, as far as the device's counters tell.
#[must_use]
pub fn of_status(ctx: &Context, peer: IpAddr, status: WcStatus) -> Failure {
    let why = explain(&ctx.counters(), peer, status);
    Failure::Of(Kind::Completion(status), format!("{why} ({status})"))
}

/// The reason why nothing came from `peer` within `patience`, as far as the device's counters tell.
#[must_use]
pub fn of_silence(ctx: &Context, peer: IpAddr, patience: Duration) -> Failure {
    let why = silence(&ctx.counters(), peer);
    let text = format!("nothing came of {peer} within {} s: {why}", patience.as_secs());
    Failure::Of(Kind::Silence, text)
}

fn explain(counters: &DeviceCounters, peer: IpAddr, status: WcStatus) -> String {
    match status {
        WcStatus::RetryExcErr => silence(counters, peer),
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

/// Explains why a peer does not answer.
fn silence(counters: &DeviceCounters, peer: IpAddr) -> String {
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
    } else if counters.port.rx_datagrams == 0 {
        format!("no reply on UDP/4791 from {peer}: check the firewall between")
    } else if counters.transport.rcvd_pkts == 0 {
        format!(
            "packets on UDP/4791 arrive, but none that the connection to {peer} can use: dropped {}: is there NAT, or another \
             sender, between?",
            dropped.join(", ")
        )
    } else {
        format!(
            "{peer} stopped answering on UDP/4791: its program has ended, or the firewall between lets packets through \
             in one direction only, or no longer"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rocinante::{Counters, Drops, PortStats};

    fn counters() -> DeviceCounters {
        DeviceCounters {
            transport: Counters::default(),
            drops: Drops::default(),
            port: PortStats::default(),
            refused: (0, 0),
            handed_over: (0, 0),
        }
    }

    #[test]
    fn silence_has_a_cause() {
        let peer = IpAddr::from([10, 0, 0, 2]);
        let explained = |counters: &DeviceCounters| explain(counters, peer, WcStatus::RetryExcErr);
        let mut c = counters();
        assert_eq!(explained(&c), "no reply on UDP/4791 from 10.0.0.2: check the firewall between");
        c.refused = (3, libc::EPERM);
        assert!(explained(&c).contains("refused to send 3 packets"), "{}", explained(&c));
        c.refused = (0, 0);
        c.port.rx_datagrams = 5;
        c.drops.wrong_source = 5;
        assert!(explained(&c).contains("dropped 5 for wrong source"), "{}", explained(&c));
        c.transport.rcvd_pkts = 9;
        assert!(explained(&c).contains("stopped answering"), "{}", explained(&c));
    }

    #[test]
    fn a_connection_that_a_peer_broke_says_so() {
        let peer = IpAddr::from([10, 0, 0, 2]);
        let explained = |counters: &DeviceCounters| explain(counters, peer, WcStatus::WrFlushErr);
        let mut c = counters();
        assert!(explained(&c).contains("broke"), "{}", explained(&c));
        c.transport.remote_access_errors = 1;
        assert!(explained(&c).contains("does not permit"), "{}", explained(&c));
        c.transport.remote_invalid_request = 1;
        assert!(explained(&c).contains("path MTU"), "{}", explained(&c));
    }
}
