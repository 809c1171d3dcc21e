//! The rates of classes at the hosts' ends.

use std::io;
use std::sync::PoisonError;
use std::time::Instant;

use rocinante_netdev::handed::{Code, Refused};
use tracing::Level;

use super::{Container, Containers, Inner};
use crate::config::Config;
use crate::control::ClassStatus;
use crate::host::{Rates, Shaper, ShaperError};
use crate::limits::Share;

/// The rates at a host's end, as far as the agent has set them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shaped {
    /// Those in force; `None` if it has to look.
    rates: Option<Rates>,
    /// Why its rates are not.
    pub(super) fault: Option<String>,
}

impl Default for Shaped {
    /// An end that is new: without rates.
    fn default() -> Self {
        Self { rates: Some(Rates::default()), fault: None }
    }
}

impl Shaped {
    /// An end that an earlier agent knew.
    pub(super) fn unknown() -> Self {
        Self { rates: None, fault: None }
    }
}

impl Container {
    /// The rates that bind it, unless its class has gone.
    fn rates(&self, config: &Config) -> Option<Rates> {
        match self.class(config) {
            ClassStatus::Of(bounds) => Some(bounds.rates),
            ClassStatus::Gone { .. } => None,
        }
    }
}

impl Inner {
    /// The ends at which other rates are in force than those of their class, also those that could
    /// not be set before.
    fn misshaped(&self, config: &Config) -> Vec<u32> {
        let all = self.containers.iter();
        let wanted = all.filter_map(|(end, it)| Some((end, it, it.rates(config)?)));
        wanted.filter(|(_, it, rates)| it.shaped.rates != Some(*rates)).map(|it| *it.0).collect()
    }

    /// As [`misshaped`](Self::misshaped), without those that could not be set before.
    pub(super) fn to_shape(&self, config: &Config) -> Vec<u32> {
        let mut ends = self.misshaped(config);
        ends.retain(|end| self.containers.get(end).is_some_and(|it| it.shaped.fault.is_none()));
        ends
    }
}

impl Containers {
    /// Puts the rates of a container in force at its host's end, whose turn this thread has. Where
    /// they are, it repairs a missing part. Error: the refusal to send: they do not bind.
    pub(super) fn shape(&self, end: u32) -> Result<(), Refused> {
        let config = self.config();
        let inner = self.lock();
        let Some(container) = inner.containers.get(&end) else { return Ok(()) };
        let Some(rates) = container.rates(&config) else { return Ok(()) };
        let is_set = container.shaped.rates == Some(rates);
        if is_set && rates == Rates::default() {
            return Ok(());
        }
        let name = container.name.clone();
        drop(inner);
        // The kernel takes its time.
        let opened = Shaper::open().map_err(|e| ShaperError::Kernel("open rtnetlink", e));
        let set = opened.and_then(|mut shaper| shaper.set(end, &name, rates, is_set));
        let mut inner = self.lock();
        let Some(container) = inner.containers.get_mut(&end) else {
            drop(inner);
            // It has gone meanwhile, and its end with all that is there.
            let _ = Shaper::open().and_then(|mut shaper| shaper.remove_ifb(end));
            return Ok(());
        };
        let fault = set.err().map(|error| error.to_string());
        let is_set = fault.is_none();
        container.shaped = Shaped { rates: Some(rates).filter(|_| is_set), fault: fault.clone() };
        let Some(why) = fault else { return Ok(()) };
        let reason = format!("the rates of your container do not bind at {name}: {why}");
        Err(Refused::new(Code::Failed, reason, "see the log of the agent, or ask its operator"))
    }

    /// Puts the rates of classes in force at each of these ends.
    pub(super) fn shape_each(&self, ends: &[u32]) {
        for end in ends {
            let turn = self.turn_of(*end);
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            let Err(refused) = self.shape(*end) else { continue };
            let inner = self.lock();
            let Some(container) = inner.containers.get(end) else { continue };
            let share = Share::Container(container.namespace);
            if inner.journal.permits(share, Level::ERROR, Instant::now()) {
                tracing::error!(container = container.label(), "{}", refused.reason);
            }
        }
    }

    /// Puts the rates of all classes in force, and removes what an earlier agent left of containers
    /// that are not there any more.
    pub(crate) fn shape_all(&self) {
        let misshaped = self.lock().misshaped(&self.config());
        self.shape_each(&misshaped);
        self.share_uplinks(true);
        if let Err(error) = self.remove_ifbs() {
            tracing::warn!("parts of containers that have gone stay: {error}");
        }
    }

    /// Removes the ifbs of ends that are none of a container's.
    pub(super) fn remove_ifbs(&self) -> io::Result<()> {
        let links = self.lock().namespaces.links(None)?;
        for end in links.iter().filter_map(|link| Shaper::end_of(&link.name, &link.kind)) {
            let turn = self.turn_of(end);
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.lock().containers.contains_key(&end) {
                Shaper::open()?.remove_ifb(end)?;
            }
        }
        Ok(())
    }
}

impl Container {
    /// Removes what stays of its rates when its host's end has gone.
    pub(super) fn clear_gone(&self, end: u32) {
        if self.shaped != Shaped::default()
            && let Err(error) = Shaper::open().and_then(|mut shaper| shaper.remove_ifb(end))
        {
            tracing::warn!(container = self.label(), "its ifb stays: {error}");
        }
    }
}
