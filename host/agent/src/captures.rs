//! Captures for programs that may not capture themselves. Each gets what passes the host's end of
//! its own container's interface, of UDP port 4791.
//!
//! A packet socket that is handed over could be bound to any interface of the host. So the agent
//! has it, on a thread for each capture, which sends frames on over the program's connection. It
//! works for a bounded time in each millisecond, and waits for no program.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rocinante_netdev::for_agent::descriptors::wait_readable;
use rocinante_netdev::handed::capture::{Ask, Begun, Frames, answer, asked};
use rocinante_netdev::handed::{Code, Refused, WAIT_MAX};
use rocinante_netdev::{Capture, Interface};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tracing::Level;

use crate::asker::{Asker, Own};
use crate::closers::Foreign;
use crate::ends::Ends;
use crate::journal::Journal;
use crate::limits::{Limits, Share};
use crate::ready::readable;
use crate::server::ended;

/// Frames of a capture in each of its pauses, which bound the agent's work for a container. More
/// wait in the kernel, or are dropped there.
const FRAMES_EACH: usize = 128;
const PAUSE: Duration = Duration::from_millis(1);
/// How long a capture without frames does not look whether it ends.
const LOOK_MS: i32 = 100;

/// The captures, each by the index of the host's end.
#[derive(Debug)]
pub(crate) struct Captures {
    limits: Arc<Limits>,
    inner: Mutex<BTreeMap<u32, Arc<AtomicBool>>>,
}

/// A capture that may begin, until it is dropped: no other of its interface does.
struct Place<'a> {
    captures: &'a Captures,
    interface: Interface,
    ends: Arc<AtomicBool>,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.captures.lock().remove(&self.interface.index);
    }
}

impl Captures {
    /// `limits` say how often a share may ask.
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits: Arc::new(limits), inner: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<AtomicBool>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all that there are.
    pub(crate) fn end_all(&self) {
        self.lock().values().for_each(|ends| ends.store(true, Ordering::Relaxed));
    }

    /// Captures for the program at the other end, until it hangs up or ends, its interface goes, or
    /// [`end_all`](Self::end_all). At most `most` at a time, which is asked for under the lock that
    /// `end_all` takes.
    pub(crate) async fn serve(
        &self,
        (own, ends): (&Own, &Ends),
        journal: &Journal,
        most: impl Fn() -> usize,
        connection: Foreign<OwnedFd>,
    ) {
        let asker = Asker::of(&connection, own);
        let share = asker.as_ref().map_or(Share::Stranger, |it| ends.share_of(it, own));
        let Ok(connection) = readable(connection.of(share)) else { return };
        let now = Instant::now();
        let Some(permit) = self.limits.enter(share, now) else { return };
        let counted = permit.counts(now);
        let read = connection.async_io(Interest::READABLE, |from| asked(from));
        let Ok(Ok(ask)) = tokio::time::timeout(WAIT_MAX, read).await else { return };
        drop(permit);
        let busy = || Refused::new(Code::Busy, "your container asks too often", "");
        let begun = match asker {
            Ok(asker) if counted => {
                let place = loop {
                    match self.begin(ends, &asker, &ask, &most) {
                        // One whose program has hung up lets go of the interface in a moment.
                        Err(refused)
                            if refused.code == Code::InUse && now.elapsed() < WAIT_MAX / 2 =>
                        {
                            tokio::time::sleep(PAUSE).await;
                        }
                        begun => break begun,
                    }
                };
                place.map(|place| (asker, place))
            }
            Ok(_) => Err(busy()),
            Err(refused) => Err(refused),
        };
        let (asker, place) = match begun {
            Ok(begun) => begun,
            Err(refused) => {
                if journal.permits(share, Level::WARN, now) {
                    let container = journal.name(share);
                    tracing::warn!(container, "no capture: {refused}");
                }
                let _ = answer(connection.get_ref(), Err(refused));
                return;
            }
        };
        if journal.permits(share, Level::INFO, now) {
            let (container, pid) = (&place.interface.name, asker.pid());
            tracing::info!(container, pid, "captures its packets");
        }
        let Ok(process) = readable(asker.into_pidfd()) else { return };
        let connection = Arc::new(connection);
        let (done, mut is_done) = oneshot::channel::<()>();
        let (to, interface) = (Arc::clone(&connection), place.interface.clone());
        let stop = Arc::clone(&place.ends);
        let work = move || {
            // Whatever it ends by, the program sees it by the end of the connection.
            let _ = capture(&to, &interface, &ask, &stop);
            drop((to, done));
        };
        if std::thread::Builder::new().name("capture".into()).spawn(work).is_err() {
            return;
        }
        let is_over = tokio::select! {
            _ = ended(&connection) => false,
            _ = process.readable() => false,
            _ = &mut is_done => true,
        };
        place.ends.store(true, Ordering::Relaxed);
        if !is_over {
            // The kernel has let go of its ring when the next one begins.
            let _ = is_done.await;
        }
    }

    /// The interface that a program may have captured. Error: the refusal to send.
    fn begin(
        &self,
        ends: &Ends,
        asker: &Asker,
        ask: &Ask,
        most: &impl Fn() -> usize,
    ) -> Result<Place<'_>, Refused> {
        let none = || Refused::new(Code::Interface, "your container has no such interface", "");
        let (index, end) =
            ends.end_of_interface(&asker.namespace, ask.interface).ok_or_else(none)?;
        let interface = Interface::by_name(&end.name).ok().filter(|it| it.index == index);
        let interface = interface.ok_or_else(none)?;
        let mut all = self.lock();
        let most = most();
        let hint = "see captures_max in agent.toml";
        if most == 0 {
            let reason = "the operator permits no captures";
            return Err(Refused::new(Code::Forbidden, reason, hint));
        }
        if all.contains_key(&index) {
            let reason = "another program captures your interface already";
            return Err(Refused::new(Code::InUse, reason, "end it first"));
        }
        if all.len() >= most {
            let reason = format!("the agent takes {} captures already", all.len());
            return Err(Refused::new(Code::Busy, reason, hint));
        }
        let stop = Arc::<AtomicBool>::default();
        all.insert(index, Arc::clone(&stop));
        Ok(Place { captures: self, interface, ends: stop })
    }
}

/// Captures until `stop`, or until the interface or the connection ends. Error: the connection's.
fn capture(
    to: &AsyncFd<Foreign<OwnedFd>>,
    interface: &Interface,
    ask: &Ask,
    stop: &AtomicBool,
) -> io::Result<()> {
    let to = to.get_ref();
    let mut capture = match Capture::open(interface.index, &ask.wanted, ask.snap) {
        Ok(capture) => capture,
        Err(error) => {
            let reason = format!("the kernel refuses: {error}");
            return answer(to, Err(Refused::new(Code::Failed, reason, "")));
        }
    };
    let whole_because = capture.whole_because().map(ToString::to_string);
    answer(to, Ok(Begun { host_end: interface.name.clone(), whole_because }))?;
    let mut frames = Frames::default();
    while !stop.load(Ordering::Relaxed) {
        let mut count = 0;
        while count < FRAMES_EACH
            && frames.has_room()
            && capture.next(|it| frames.push(&it)).is_some()
        {
            count += 1;
        }
        match frames.send(to, capture.dropped()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            sent => sent?,
        }
        // The kernel's error says no more than that the interface is down: it may come up again.
        let is_there = |it: Interface| it.index == interface.index;
        if capture.check().is_err() && !Interface::by_name(&interface.name).is_ok_and(is_there) {
            return Ok(());
        }
        if count == 0 {
            wait_readable(capture.as_fd(), LOOK_MS)?;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
