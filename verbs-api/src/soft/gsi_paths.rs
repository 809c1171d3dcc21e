//! The paths on which QP1 sends.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use rocinante_netdev::PathSpec;
use rocinante_stack::cm::Transmit;
use rocinante_stack::types::Time;

use super::shard::Shard;

/// QP1's paths.
#[derive(Debug, Default)]
pub(super) struct GsiPaths {
    /// The ports' paths, with the time of their last use.
    paths: BTreeMap<(IpAddr, IpAddr), (u32, Time)>,
    /// How many more may be made.
    fresh: Allowance,
}

impl GsiPaths {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.paths.len()
    }
}

/// Limits the new paths of QP1. Each costs a route lookup in the kernel, which forged addresses
/// could otherwise trigger without end.
#[derive(Debug)]
struct Allowance {
    left: u32,
    /// Time of the last growth.
    since: Time,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { left: Self::MAX, since: Time(0) }
    }
}

impl Allowance {
    const MAX: u32 = 64;
    /// Nanoseconds per unit of growth: 10 ms.
    const GROWTH: u64 = 10_000_000;

    fn take(&mut self, now: Time) -> bool {
        let grown = now.since(self.since) / Self::GROWTH;
        self.left =
            Self::MAX.min(self.left.saturating_add(u32::try_from(grown).unwrap_or(u32::MAX)));
        // The rest of a unit counts for the next one, unless there are as many as there may be.
        self.since = match self.left {
            Self::MAX => now,
            _ => self.since.after(grown * Self::GROWTH),
        };
        let granted = self.left > 0;
        self.left = self.left.saturating_sub(1);
        granted
    }
}

/// The most paths of QP1.
const PATHS_MAX: usize = 256;
/// Idle time in nanoseconds after which a path is dropped: 2 s, in which an unanswered message is
/// sent five times.
const PATH_IDLE: u64 = 2_000_000_000;

impl Shard {
    /// The path of a datagram: that of the queue pair whose peer it is for, or one of QP1's. Those
    /// for peers of connections are not limited: if they were, many peers that are asked at once
    /// would seem to be silent.
    pub(super) fn path_of_mad(&mut self, now: Time, transmit: &Transmit) -> io::Result<u32> {
        if let Some(path) = transmit.via.and_then(|qpn| self.engine.path_of(qpn)) {
            return Ok(path);
        }
        self.path_to(now, (transmit.local, transmit.remote), transmit.via.is_some())
    }

    pub(super) fn cm_path(&mut self, now: Time, way: (IpAddr, IpAddr)) -> io::Result<u32> {
        self.path_to(now, way, false)
    }

    fn path_to(
        &mut self,
        now: Time,
        (local, remote): (IpAddr, IpAddr),
        is_known: bool,
    ) -> io::Result<u32> {
        if let Some((path, used)) = self.post.ways.paths.get_mut(&(local, remote)) {
            *used = now;
            return Ok(*path);
        }
        if !is_known && !self.post.ways.fresh.take(now) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        if self.post.ways.paths.len() >= PATHS_MAX {
            let oldest = self.post.ways.paths.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(way) = oldest.map(|(way, _)| *way) {
                self.drop_cm_path(way);
            }
        }
        let spec = PathSpec { local, remote, src_port: 0xc000, tos: 0, ttl: 64, flow_label: 0 };
        let path = self.add_path(&spec)?;
        self.post.ways.paths.insert((local, remote), (path, now));
        Ok(path)
    }

    fn drop_cm_path(&mut self, way: (IpAddr, IpAddr)) {
        if let Some((path, _)) = self.post.ways.paths.remove(&way) {
            self.flush();
            self.remove_path(path);
        }
    }

    /// Drops idle paths, so that an idle device has nothing to maintain. Returns the nanoseconds
    /// until the next path may be dropped.
    pub(super) fn tidy_cm_paths(&mut self, now: Time) -> Option<u64> {
        let idle = |(_, (_, used)): &(&_, &(u32, Time))| now.since(*used) >= PATH_IDLE;
        let idle: Vec<_> = self.post.ways.paths.iter().filter(idle).map(|(way, _)| *way).collect();
        for way in idle {
            self.drop_cm_path(way);
        }
        self.post.ways.paths.values().map(|(_, used)| PATH_IDLE - now.since(*used)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_up_comes_back_slowly() {
        let mut fresh = Allowance::default();
        let at = |ms: u64| Time(ms * 1_000_000);
        let granted = |fresh: &mut Allowance, ms| (0..1000).filter(|_| fresh.take(at(ms))).count();
        assert_eq!(granted(&mut fresh, 1000), 64);
        assert_eq!(granted(&mut fresh, 1005), 0);
        assert_eq!(granted(&mut fresh, 1030), 3);
        assert_eq!(granted(&mut fresh, 60_000), 64);
    }

    #[test]
    fn what_comes_back_does_not_depend_on_how_often_one_asks() {
        let mut fresh = Allowance::default();
        let mut granted = |ms: u64| u32::from(fresh.take(Time(ms * 1_000_000)));
        let first: u32 = (0..64).map(|_| granted(1000)).sum();
        // Every 7 ms: a unit of 10 ms is never over when asked, and one is due in each.
        let later: u32 = (1..=1000).map(|n| granted(1000 + 7 * n)).sum();
        assert_eq!((first, later), (64, 700));
        // A full allowance saves nothing up.
        let again: u32 = (0..1000).map(|_| granted(60_009)).sum();
        assert_eq!((again, granted(60_018), granted(60_019)), (64, 0, 1));
    }
}
