//! Counts of requests, of a container and of all.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use rocinante_netdev::handed::Code;

use crate::control::{Requests, Waited};
use crate::waits::Waits;

/// Requests, by their ends.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    granted: u64,
    lost: u64,
    refused: HashMap<Code, u64>,
    waits: Waits,
}

/// The end of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    /// Its program got ports, after this time.
    Granted(Duration),
    /// Its program hung up, after this time.
    Lost(Duration),
    Refused(Code),
}

impl Tally {
    /// Adds a request.
    pub(crate) fn add(&mut self, end: End) {
        match end {
            End::Granted(waited) => {
                self.granted += 1;
                self.waits.add(waited);
            }
            End::Lost(waited) => {
                self.lost += 1;
                self.waits.add(waited);
            }
            End::Refused(code) => *self.refused.entry(code).or_default() += 1,
        }
    }

    /// The times of those granted or lost.
    pub(crate) fn waits(&self) -> &Waits {
        &self.waits
    }

    /// The counts.
    pub(crate) fn requests(&self) -> Requests {
        let refused = self.refused.iter().map(|(code, count)| (Named(*code).to_string(), *count));
        Requests {
            granted: self.granted,
            lost: self.lost,
            refused: refused.collect(),
            waited: Waited {
                p50_us: self.waits.median_us(),
                p99_us: self.waits.p99_us(),
                max_us: self.waits.max_us(),
                mean_us: self.waits.mean_us(),
            },
        }
    }
}

/// A code by its name in a message.
pub(crate) struct Named(pub(crate) Code);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = serde_json::to_value(self.0).unwrap_or_default();
        f.write_str(name.as_str().unwrap_or("other"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_granted_and_lost_have_waited_and_those_refused_have_not() {
        let mut tally = Tally::default();
        tally.add(End::Granted(Duration::from_micros(2)));
        tally.add(End::Lost(Duration::from_micros(6)));
        for code in [Code::Forbidden, Code::Failed, Code::Forbidden] {
            tally.add(End::Refused(code));
        }
        let requests = tally.requests();
        assert_eq!((requests.granted, requests.lost), (1, 1));
        let count = |code| requests.refused[&Named(code).to_string()];
        assert_eq!([count(Code::Forbidden), count(Code::Failed)], [2, 1]);
        assert_eq!((requests.waited.max_us, requests.waited.mean_us), (6, 4));
        assert_eq!(tally.waits().histogram().1, 2);
    }
}
