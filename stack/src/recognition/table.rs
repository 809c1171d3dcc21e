//! The peers that were probed, and the replies.

use core::net::IpAddr;
use std::collections::BTreeMap;

use crate::tuning::recognition::{PAUSE, PEERS_MAX, SOON};
use crate::types::Time;
use crate::wire::PeerInfo;

/// The peers that were probed. An expired record still says what its peer was.
#[derive(Debug)]
pub(crate) struct Table {
    records: BTreeMap<IpAddr, Record>,
    /// When the next record expires.
    expires: Time,
}

#[derive(Debug)]
struct Record {
    local: IpAddr,
    /// Until then the peer is not probed again, and its reply holds for new queue pairs.
    until: Time,
    /// Transaction id of the probe without a reply.
    tid: Option<u64>,
    info: Option<PeerInfo>,
}

impl Default for Table {
    fn default() -> Self {
        Self { records: BTreeMap::new(), expires: Time::NEVER }
    }
}

impl Table {
    pub(crate) fn len(&self) -> usize {
        self.records.len()
    }

    /// When the next record expires.
    #[inline]
    pub(super) fn expires(&self) -> Time {
        self.expires
    }

    /// Records expire: finds when the next one will.
    pub(super) fn expire(&mut self, now: Time) {
        let later = self.records.values().map(|record| record.until).filter(|until| *until > now);
        self.expires = later.min().unwrap_or(Time::NEVER);
    }

    /// The last reply of a peer, of any age.
    pub(crate) fn last(&self, remote: IpAddr) -> Option<PeerInfo> {
        self.records.get(&remote)?.info
    }

    /// `None` if the peer is to be probed; else its reply, if there is one.
    pub(super) fn known(&self, now: Time, remote: IpAddr) -> Option<Option<PeerInfo>> {
        let record = self.records.get(&remote)?;
        (now < record.until).then_some(record.info)
    }

    /// Whether there is room for a peer. Expired records make room.
    pub(super) fn makes_room(&mut self, now: Time, remote: IpAddr) -> bool {
        if self.records.len() >= PEERS_MAX && !self.records.contains_key(&remote) {
            self.records.retain(|_, record| now < record.until);
        }
        self.records.len() < PEERS_MAX || self.records.contains_key(&remote)
    }

    /// A probe leaves for `remote`. Without one, for want of room, another is due soon.
    pub(super) fn probed(&mut self, now: Time, local: IpAddr, remote: IpAddr, probe: Probed) {
        let (until, tid) = match probe {
            Probed::Here(tid) => (now.after(PAUSE), Some(tid)),
            Probed::Elsewhere => (now.after(PAUSE), None),
            Probed::No => (now.after(SOON), None),
        };
        self.records.insert(remote, Record { local, until, tid, info: None });
        self.expires = self.expires.min(until);
    }

    /// A reply from `remote` to `local`. Returns whether it answers the probe.
    pub(super) fn replied(
        &mut self,
        now: Time,
        (local, remote): (IpAddr, IpAddr),
        tid: u64,
        info: Option<PeerInfo>,
    ) -> bool {
        let record = self.records.get_mut(&remote).filter(|record| {
            record.local == local && record.tid == Some(tid) && now < record.until
        });
        record.map(|record| (record.tid, record.info) = (None, info)).is_some()
    }

    /// Another engine has the reply of a peer, or the peer is given up.
    pub(super) fn set(&mut self, remote: IpAddr, info: Option<PeerInfo>) {
        if let Some(record) = self.records.get_mut(&remote) {
            record.info = info;
        }
    }
}

/// Whether a probe leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probed {
    /// With this transaction id.
    Here(u64),
    /// From another engine.
    Elsewhere,
    /// There is no room for it.
    No,
}
