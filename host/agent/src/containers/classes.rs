//! The classes of containers.

use std::collections::HashMap;

use super::{Container, Containers, Inner};
use crate::class::Subject;
use crate::config::Config;
use crate::control::ClassStatus;
use crate::host::Sources;
use crate::limits::Share;
use crate::state::Introduced;

/// The facts that decide a class. The name of a control group is none: a user of the host may
/// choose it, and another container of a pod that asks last.
pub(super) fn subject<'a>(
    end: &'a str,
    introduced: Option<&'a Introduced>,
    sources: &'a Sources,
) -> Subject<'a> {
    let called = introduced.map(|it| &it.called);
    Subject {
        end,
        id: called.map(|it| it.id.as_str()),
        engine: called.map(|it| it.engine.as_str()),
        addresses: &sources.addresses,
        class: introduced.and_then(|it| it.class.as_deref()),
        rates: introduced.and_then(|it| it.rates).unwrap_or_default(),
    }
}

impl Container {
    pub(super) fn class(&self, config: &Config) -> ClassStatus {
        let of = subject(&self.name, self.introduced.as_ref(), &self.sources);
        match config.bounds(&of) {
            Ok(bounds) => ClassStatus::Of(bounds),
            Err(_) => ClassStatus::Gone { name: of.class.unwrap_or_default().to_owned() },
        }
    }
}

impl Containers {
    /// Has each container asked no more often than its class may: with several ends on the host as
    /// often as the strictest.
    pub(super) fn classify(&self, inner: &Inner) {
        let config = self.config();
        let mut others = HashMap::new();
        let all = inner.containers.values().filter(|_| !config.classes.is_empty());
        for container in all {
            let ClassStatus::Of(bounds) = container.class(&config) else { continue };
            let rate = others.entry(Share::Container(container.namespace));
            let rate = rate.or_insert(bounds.requests_per_second);
            *rate = bounds.requests_per_second.min(*rate);
        }
        self.limits.set_others(others);
    }
}
