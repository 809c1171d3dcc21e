//! The reasons that hold a container or a queue pair back, each from a count.

use std::time::Duration;

use crate::output::digits;
use crate::stat::rates::{ContainerRates, QueuePairRates};

/// The reasons of a container in an interval, the strongest first: limits that are reached, queues
/// in which its packets wait, drops, and missing processors.
pub(super) fn container(it: &ContainerRates, seconds: f64) -> Vec<String> {
    let reached =
        it.limits.iter().filter(|limit| limit.current.is_some_and(|now| now >= limit.max));
    let reached = reached.map(|limit| format!("limit {}={}", limit.name, limit.max));
    let waiting = it.queues.iter().map(|queue| {
        let rate = it.limits.iter().find(|limit| limit.name == queue.name);
        let rate = rate.map(|limit| format!(" of {} Gb/s", digits(limit.max as f64 * 1e-9)));
        let (name, rate) = (queue.name, rate.unwrap_or_default());
        format!("{name}{rate}: {} waited, {} B queued", queue.delayed, queue.backlog_bytes)
    });
    let drops = it.drops.iter().map(|(reason, count)| format!("dropped {reason}={count}"));
    let unread = (it.unread > 0).then(|| format!("{} pages change while read", it.unread));
    reached.chain(waiting).chain(drops).chain(no_processor(it, seconds)).chain(unread).collect()
}

/// The reasons of a queue pair of this container: its peer's room and the network, then those of
/// its device.
pub(super) fn queue_pair(it: &QueuePairRates, of: &ContainerRates, seconds: f64) -> Vec<String> {
    let rnr =
        (it.rnr_received > 0).then(|| format!("peer has no receive: RNR {}", it.rnr_received));
    let room = (it.held_by_peer > 0).then(|| format!("peer's room {}", it.held_by_peer));
    let network = (it.held_by_network > 0).then(|| format!("network {}", it.held_by_network));
    [rnr, room, network, no_processor(of, seconds)].into_iter().flatten().collect()
}

/// How long no processor drove its devices, in all.
fn no_processor(it: &ContainerRates, seconds: f64) -> Option<String> {
    let late = Duration::from_micros(it.undriven_us);
    (!late.is_zero()).then(|| format!("no processor {late:.3?} in {seconds:.1} s"))
}
