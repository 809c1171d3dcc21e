//! The thread of a device that shares its addresses. It sleeps until another process joins, or one
//! ends: a leader, or, if that is this process, any; or the agent.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::helper::Helper;
use super::leader::Leadership;
use super::lifeline::AgentLink;
use super::rendezvous::{Objects, welcome};
use crate::kernel::descriptors::EventFd;
use crate::tuning::shared::SEARCH_PAUSES;

/// How long the thread waits where no descriptor was left.
const PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The thread.
#[derive(Debug)]
pub(super) struct Host {
    stop: Arc<EventFd>,
    /// Readable once this process has become a leader, or has to look for the notes of a process
    /// with another slot.
    pub(super) news: Arc<EventFd>,
    /// A process has ended, and the port has not looked for its notes.
    ended: Arc<AtomicBool>,
    thread: Option<Helper<Vec<AgentLink>>>,
    process: u32,
}

impl Host {
    /// Starts it for the addresses of a device: the objects for processes that join, and the
    /// leadership. With `follows`, this process has led an address from the beginning, and was not
    /// the first. Error: no thread or no descriptor left.
    pub(super) fn start(
        places: Vec<(Arc<Objects>, Leadership)>,
        follows: bool,
        agents: Vec<AgentLink>,
    ) -> io::Result<Self> {
        let (stop, news) = (Arc::new(EventFd::new()?), Arc::new(EventFd::new()?));
        let ended = Arc::new(AtomicBool::new(false));
        let (stop_too, news_too) = (stop.clone(), news.clone());
        let search = follows.then(|| (Instant::now(), Duration::ZERO));
        let mut work =
            Work { stop: stop_too, news: news_too, ended: ended.clone(), places, search, agents };
        let thread = Helper::start("roce-meet", move || {
            while work.step() {}
            let Work { agents, .. } = work;
            agents
        })?;
        Ok(Self { stop, news, ended, thread: Some(thread), process: std::process::id() })
    }

    /// Whether this is the process that started it, and no child of fork(2): that has not got the
    /// thread.
    pub(super) fn is_own(&self) -> bool {
        self.process == std::process::id()
    }

    /// Whether to look for notes of processes that have gone, since the last call.
    pub(super) fn has_to_look(&self) -> bool {
        self.ended.swap(false, Ordering::Relaxed)
    }

    /// It could not look: the thread has it do so again.
    pub(super) fn look_again(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Ends it, or leaves it behind if a neighbour keeps it. If this process `owes` something, the
    /// agent has it done.
    pub(super) fn stop(&mut self, owes: bool) {
        self.stop.signal();
        let agents = self.thread.take().and_then(Helper::end).unwrap_or_default();
        if !owes {
            agents.into_iter().for_each(AgentLink::farewell);
        }
    }
}

struct Work {
    stop: Arc<EventFd>,
    news: Arc<EventFd>,
    ended: Arc<AtomicBool>,
    /// When the port looks for notes, and the pause before that.
    search: Option<(Instant, Duration)>,
    places: Vec<(Arc<Objects>, Leadership)>,
    agents: Vec<AgentLink>,
}

impl Work {
    /// Waits, and does what there is to do. Returns whether to go on.
    fn step(&mut self) -> bool {
        // A failed step is tried again.
        let again = self.places.iter().any(|(_, leadership)| leadership.is_vacant());
        let at = self.search.map(|(at, _)| at);
        let at = at.into_iter().chain(self.agents.iter().filter_map(AgentLink::due)).min();
        let pause = at.map(|at| timespec(at.saturating_duration_since(Instant::now())));
        let Some(ready) = self.wait(pause.or_else(|| again.then_some(PAUSE)), true) else {
            return true;
        };
        let (stop, mut rest) = ready.split_first().expect("the first one");
        if *stop {
            return false;
        }
        for agent in &mut self.agents {
            let is_readable = agent.waits_for().and_then(|_| rest.split_off_first());
            agent.attend(is_readable == Some(&true));
        }
        let mut all_done = true;
        for (objects, leadership) in &mut self.places {
            // Without memory for more, only the stop was looked at.
            let Some((join, behind)) = rest.split_first() else { break };
            let (of_leadership, behind) = behind.split_at(leadership.waits_for().count());
            rest = behind;
            all_done &= !join || welcome(objects);
            let had = leadership.is_ours.load(Ordering::Relaxed);
            match leadership.attend(of_leadership) {
                Ok(true) => self.search = Some((Instant::now(), Duration::ZERO)),
                Ok(false) => {}
                Err(_) => all_done = false,
            }
            if leadership.is_ours.load(Ordering::Relaxed) && !had {
                self.news.signal();
            }
        }
        self.search();
        // Unfinished work would be reported at once.
        all_done || self.wait(Some(PAUSE), false).is_none_or(|ready| !ready[0])
    }

    /// Has the port look for notes, if it is time.
    fn search(&mut self) {
        let Some((_, before)) = self.search.filter(|(at, _)| *at <= Instant::now()) else { return };
        let [first, last] = SEARCH_PAUSES;
        if before == last && !self.ended.load(Ordering::Relaxed) {
            self.search = None;
            return;
        }
        let pause = (4 * before).clamp(first, last);
        self.search = Some((Instant::now() + pause, pause));
        self.ended.store(true, Ordering::Relaxed);
        self.news.signal();
    }

    /// Waits for the stop, and for `everything` besides; returns the ready ones.
    fn wait(&self, limit: Option<Timespec>, everything: bool) -> Option<Vec<bool>> {
        let agents = self.agents.iter().filter(|_| everything).filter_map(AgentLink::waits_for);
        let first = std::iter::once((*self.stop).as_fd()).chain(agents);
        let places = self.places.iter().filter(|_| everything).flat_map(|(objects, leadership)| {
            std::iter::once(objects.listener.as_fd()).chain(leadership.waits_for())
        });
        let mut all: Vec<PollFd<'_>> =
            first.chain(places).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut all, limit.as_ref()) {
            Ok(_) => Some(all.iter().map(|fd| !fd.revents().is_empty()).collect()),
            Err(Errno::INTR) => None,
            // There is no memory for it, or there are more descriptors than there may be now.
            Err(_) => {
                std::thread::sleep(Duration::from_secs(1));
                everything.then(|| self.wait(Some(AT_ONCE), false)).flatten()
            }
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    let (seconds, nanoseconds) = (time.as_secs().min(60), time.subsec_nanos());
    Timespec { tv_sec: seconds.cast_signed(), tv_nsec: nanoseconds.into() }
}
