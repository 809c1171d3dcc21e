//! Why a request failed, for those that asked (`ROCINANTE_LOG=warn`).

use std::net::IpAddr;
use std::time::Duration;

use rocinante_soft::model::device::DeviceCounters;

use crate::abi::Wc;
use crate::log::{Level, say};

/// A peer that is there may take longer to answer, where it shares its processor.
const SHORT: Duration = Duration::from_millis(50);

/// `enum ibv_wc_status`.
mod status {
    pub(super) const SUCCESS: i32 = 0;
    pub(super) const LOC_LEN_ERR: i32 = 1;
    pub(super) const LOC_PROT_ERR: i32 = 4;
    pub(super) const WR_FLUSH_ERR: i32 = 5;
    pub(super) const REM_INV_REQ_ERR: i32 = 9;
    pub(super) const REM_ACCESS_ERR: i32 = 10;
    pub(super) const REM_OP_ERR: i32 = 11;
    pub(super) const RETRY_EXC_ERR: i32 = 12;
    pub(super) const RNR_RETRY_EXC_ERR: i32 = 13;
}

/// A queue pair whose request failed, as far as it is still there, and its device.
#[derive(Default)]
pub(crate) struct Asked {
    pub(crate) peer: Option<IpAddr>,
    /// How long a packet of it waits for an ACK, with all retries.
    pub(crate) patience: Option<Duration>,
    pub(crate) counters: DeviceCounters,
}

/// Says why these completions failed.
#[cold]
pub(crate) fn tell(completions: &[Wc], ask: impl Fn(u32) -> Option<Asked>) {
    for wc in completions.iter().filter(|wc| wc.status != status::SUCCESS) {
        // Flushed requests follow the one that failed.
        let level = if wc.status == status::WR_FLUSH_ERR { Level::Debug } else { Level::Warn };
        if !crate::log::says(level) {
            continue;
        }
        let (qpn, asked) = (wc.qp_num, ask(wc.qp_num).unwrap_or_default());
        let why = why(wc.status, &asked);
        say(level, format_args!("queue pair {qpn:#08x}, request {:#x}: {why}", wc.wr_id));
    }
}

fn why(status: i32, Asked { peer, patience, counters }: &Asked) -> String {
    let peer = &peer.map_or_else(|| "the peer".to_owned(), |peer| peer.to_string());
    match status {
        status::RETRY_EXC_ERR => match patience.filter(|time| *time < SHORT) {
            Some(time) if counters.refused.0 == 0 => format!(
                "retries exceeded: {peer} did not answer within {time:.1?}, which is all that the \
                 queue pair's ACK timeout and retries give: a longer timeout is usual \
                 (ibv_qp_attr::timeout, perftest's -u: 14 to 18)"
            ),
            _ => format!("retries exceeded: {}", silence(peer, counters)),
        },
        status::RNR_RETRY_EXC_ERR => format!(
            "RNR retries exceeded: {peer} answers, but its program posted no receive in time"
        ),
        status::REM_ACCESS_ERR => {
            format!("{peer} refused the access: key, range or permission of its region is another")
        }
        status::REM_INV_REQ_ERR => format!(
            "{peer} refused the request as invalid: it is longer than the receive, or of a kind \
             that the queue pair there does not permit"
        ),
        status::REM_OP_ERR => format!("{peer} could not complete the request"),
        status::LOC_LEN_ERR => {
            format!("a message from {peer} is longer than the receive that is posted for it")
        }
        status::LOC_PROT_ERR => {
            "the program's memory is not registered so: key, range or permission".to_owned()
        }
        status::WR_FLUSH_ERR => "flushed: the queue pair is in the error state".to_owned(),
        _ => format!("status {status} of enum ibv_wc_status"),
    }
}

/// Why a peer does not answer.
fn silence(peer: &str, counters: &DeviceCounters) -> String {
    let (refused, errno) = counters.refused;
    if refused > 0 {
        let error = std::io::Error::from_raw_os_error(errno);
        let rule = if errno == libc::EPERM {
            ": a rule of this network namespace forbids them (`nft list ruleset`)"
        } else {
            ""
        };
        format!("the kernel refused to send {refused} packets: {error}{rule}")
    } else if counters.port.rx_datagrams == 0 {
        format!(
            "no packet of {peer} came to UDP port 4791: no program is there, a firewall is \
             between, or a link between has a smaller MTU than both ends"
        )
    } else if counters.transport.rcvd_pkts == 0 {
        let dropped = counters.drops.iter().filter(|(_, count)| *count > 0);
        let dropped =
            dropped.map(|(name, count)| format!("{count} for {}", name.replace('_', " ")));
        let dropped: Vec<String> = dropped.collect();
        format!(
            "packets come to UDP port 4791, and none is of use; dropped {}: is there NAT, or \
             another sender, between?",
            dropped.join(", ")
        )
    } else if let Some(us @ 50_000..) = counters
        .transport
        .retry_exceeded_undriven_us
        .checked_div(counters.transport.retry_exceeded_err)
    {
        format!(
            "{peer} did not answer in time, and {} ms of that time this process got no processor \
             to drive its device: give both sides more of it, or the queue pair a longer timeout \
             (ibv_qp_attr::timeout, perftest's -u: 18)",
            us / 1000
        )
    } else {
        format!(
            "{peer} answers no longer: its program has ended, its queue pair is in the error \
             state, or the network lets packets through in one direction only"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_time_for_answers_is_named() {
        let of = |ms, refused| {
            let mut counters = DeviceCounters::default();
            counters.refused = (refused, libc::EPERM);
            let patience = Some(Duration::from_millis(ms));
            why(status::RETRY_EXC_ERR, &Asked { peer: None, patience, counters })
        };
        let short = "retries exceeded: the peer did not answer within 1.0ms";
        assert!(of(1, 0).starts_with(short), "{}", of(1, 0));
        assert!(of(500, 0).contains("no packet of the peer came"), "{}", of(500, 0));
        assert!(of(1, 1).contains("the kernel refused to send 1 packets"), "{}", of(1, 1));
    }
}
