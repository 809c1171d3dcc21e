//! Hands pages over.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante_netdev::handed::WAIT_MAX;
use rocinante_netdev::handed::page::{asked, hand_over, make};
use tokio::io::Interest;

use super::Pages;
use crate::asker::{Asker, Own};
use crate::closers::Foreign;
use crate::ends::Ends;
use crate::limits::Share;
use crate::ready::readable;
use crate::server::ended;

/// Ends of devices are written together.
const WRITE_PAUSE: Duration = Duration::from_millis(100);

impl Pages {
    /// Hands the program at the other end a page, and reads it until the program closes its device
    /// or ends. It hangs up on a program that gets none.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        own: &Own,
        ends: &Ends,
        connection: Foreign<OwnedFd>,
    ) {
        let Ok(asker) = Asker::of(&connection, own) else { return };
        let share = ends.share_of(&asker, own);
        let connection = connection.of(share);
        let now = Instant::now();
        let may = self.limits.enter(share, now).is_some_and(|permit| permit.counts(now));
        if !may || matches!(share, Share::Stranger) {
            return;
        }
        let Some((index, end)) = ends.end_of(&asker.namespace) else { return };
        let namespace = asker.namespace.inode();
        let (Ok(connection), Ok(process)) = (readable(connection), readable(asker.into_pidfd()))
        else {
            return;
        };
        let read = connection.async_io(Interest::READABLE, |from| asked(from));
        let Ok(Ok(ask)) = tokio::time::timeout(WAIT_MAX, read).await else { return };
        let made = make().and_then(|page| Ok((page.try_clone()?, File::from(page))));
        let Ok((theirs, ours)) = made else { return };
        let of = (index, end.name.as_str(), namespace);
        let Some((id, seat)) = self.begin(of, (ask.key, ask.ledger), ours) else { return };
        let ledger = seat.as_ref().map(|(shared, slot)| (shared.file.as_fd(), *slot));
        if hand_over(connection.get_ref(), theirs.as_fd(), ledger).is_ok() {
            drop(theirs);
            tokio::select! {
                _ = ended(&connection) => {}
                _ = process.readable() => {}
            }
        }
        drop((connection, process));
        self.ended(id).await;
        tokio::time::sleep(WRITE_PAUSE).await;
        let it = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || it.write()).await;
    }
}
