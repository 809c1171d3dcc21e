//! Ports that were handed over, until their last holder has gone.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use super::Agent;
use crate::containers::PortId;
use crate::holders::{self, Holder};
use crate::limits::Share;
use crate::ready::readable;

/// Searches for the holders of ports at a time, each on a thread of its container's share.
pub(super) const SEARCHES_MAX: usize = 2;
/// After this time of a search other containers' do not wait for it.
const SEARCH_MAX: Duration = Duration::from_secs(2);
/// When to look again for a process that has the sockets of ports which it says it closed: it may
/// be about to. After these times only its end is waited for.
const LOOK_AGAIN: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(200), Duration::from_secs(2)];

/// Keeps the rings of ports guarded until no process has them.
///
/// A container may make a search take long: so a thread of its share does it.
pub(super) async fn outlive(agent: Arc<Agent>, port: PortId) {
    let mut again = LOOK_AGAIN.into_iter();
    let mut last: Option<Holder> = None;
    loop {
        let Some(sought) = agent.containers.port(port) else { return };
        let share = Share::Container(sought.namespace);
        let worker = Arc::clone(&agent);
        let look = move || {
            let holder = last.filter(Holder::still_holds);
            let holder = holder.or_else(|| holders::find(&sought, &worker.own, &worker.ends));
            match &holder {
                Some(holder) => worker.containers.guard_again(port, holder),
                None => worker.containers.remove_port(port),
            }
            holder
        };
        // A search takes long where a container's processes have thousands of descriptors.
        let turn = agent.searches.turn(port.host_end, std::future::ready(())).await;
        let found = agent.closers.result(share, look);
        tokio::pin!(found);
        let quick = tokio::time::timeout(SEARCH_MAX, &mut found).await;
        drop(turn);
        let found = match quick {
            Ok(found) => found,
            Err(_) => found.await,
        };
        let Some(Some(holder)) = found else { return };
        // Without a descriptor to wait by it stays until its interface goes.
        let Ok(process) = readable(holder.pidfd.as_fd()) else { return };
        match again.next() {
            Some(pause) => drop(tokio::time::timeout(pause, process.readable()).await),
            None => drop(process.readable().await),
        }
        drop(process);
        last = Some(holder);
    }
}
