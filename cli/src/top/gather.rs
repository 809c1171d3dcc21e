//! The thread that looks at the containers, so that keys are answered while an agent is not.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rocinante_netdev::handed::page::DROP;

use crate::output::Result;
use crate::policy::live;
use crate::stat::rates::Rates;
use crate::stat::{Moment, Source};

/// News for the view.
#[derive(Debug)]
pub(super) struct News {
    /// The container that is opened, or all.
    pub(super) of: Option<String>,
    /// The figures of an interval, or why there are none.
    pub(super) rates: Result<Rates, String>,
}

/// The view's end of the thread.
pub(super) struct Gatherer {
    opened: Sender<Option<String>>,
    news: Receiver<News>,
}

/// The thread's state.
struct Worker {
    source: Source,
    of: Option<String>,
    /// The last moment of the same container.
    before: Option<Moment>,
    /// The host's end of the container that was asked about last.
    end: Option<(String, Option<String>)>,
    /// The drops by rules at an end, and the time from which on they are read again.
    rules: Option<(String, Instant, BTreeMap<String, u64>)>,
}

/// Reading the rules takes a tenth of the time at most: a cluster's are tens of thousands.
const RULES_PAUSE_TIMES: u32 = 9;

impl Gatherer {
    /// The thread ends with this value.
    pub(super) fn start(source: Source, interval: Duration, of: Option<String>) -> Self {
        let (opened, opens) = channel();
        let (tell, news) = channel();
        thread::spawn(move || {
            let mut worker = Worker { source, of, before: None, end: None, rules: None };
            let mut due = Instant::now();
            loop {
                let news = worker.look().transpose();
                let news = news.map(|rates| News { of: worker.of.clone(), rates });
                if news.is_some_and(|news| tell.send(news).is_err()) {
                    return;
                }
                // A machine that slept makes nothing up for the time.
                due = (due + interval).max(Instant::now());
                match opens.recv_timeout(due.saturating_duration_since(Instant::now())) {
                    Ok(of) => {
                        worker = Worker { of: opens.try_iter().last().unwrap_or(of), ..worker };
                        (worker.before, due) = (None, Instant::now());
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        });
        Self { opened, news }
    }

    /// Has it look at this container, or at all.
    pub(super) fn open(&self, container: Option<&str>) {
        // A thread that has ended has said why.
        let _ = self.opened.send(container.map(str::to_owned));
    }

    pub(super) fn news(&self) -> Vec<News> {
        self.news.try_iter().collect()
    }
}

impl Worker {
    /// The figures since the last look, if there was one. Error: why there is none.
    fn look(&mut self) -> Result<Option<Rates>, String> {
        let looked = self.source.look(self.of.as_deref(), self.of.is_some());
        let mut now = looked.map_err(|error| error.to_string())?;
        self.add_host_end(&mut now);
        let rates = self.before.as_ref().map(|before| Rates::between(before, &mut now));
        self.before = Some(now);
        Ok(rates)
    }

    /// Adds what rules at the host's end of a container dropped, and the queue there if an agent
    /// knows nothing of the container.
    fn add_host_end(&mut self, now: &mut Moment) {
        let (Some(_), [container]) = (&self.of, &mut now.containers[..]) else { return };
        let end = match container.place.as_ref().and_then(|it| it.to_str()) {
            Some(place) => {
                let known = self.end.take().filter(|(name, _)| *name == container.name);
                let known =
                    known.unwrap_or_else(|| (container.name.clone(), live::host_end(place)));
                let (_, end) = self.end.insert(known);
                container.add_host_end(end.as_deref());
                end.clone()
            }
            None => Some(container.name.clone()),
        };
        let dropped = end.map(|end| self.dropped_at(&end)).unwrap_or_default();
        let dropped = dropped.into_iter().map(|(rule, count)| (format!("{DROP}nft {rule}"), count));
        container.counters.insert("rules".to_owned(), dropped.collect());
    }

    fn dropped_at(&mut self, end: &str) -> BTreeMap<String, u64> {
        let now = Instant::now();
        if let Some((of, next, drops)) = &self.rules
            && of == end
            && now < *next
        {
            return drops.clone();
        }
        let drops = live::drops::dropped(end);
        let next = now + now.elapsed() * (1 + RULES_PAUSE_TIMES);
        self.rules = Some((end.to_owned(), next, drops.clone()));
        drops
    }
}
