//! The paths on which QP1 sends.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use rocinante_netdev::PathSpec;
use rocinante_stack::Allowance;
use rocinante_stack::cm::Transmit;
use rocinante_stack::types::Time;

use super::shard::Shard;
use crate::tuning::room::{PATH_IDLE, PATHS_MAX};

/// QP1's paths.
#[derive(Debug)]
pub struct GsiPaths {
    /// The ports' paths, with the time of their last use.
    paths: BTreeMap<(IpAddr, IpAddr), (u32, Time)>,
    /// The allowance for new ones. Each costs a route lookup in the kernel, which forged addresses
    /// could otherwise trigger without end.
    fresh: Allowance,
}

impl Default for GsiPaths {
    /// 64 may be made at once, and one more every 10 ms.
    fn default() -> Self {
        Self { paths: BTreeMap::new(), fresh: Allowance::new(64, 10_000_000) }
    }
}

impl GsiPaths {
    /// Number of paths.
    pub fn count(&self) -> usize {
        self.paths.len()
    }
}

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

    pub fn cm_path(&mut self, now: Time, way: (IpAddr, IpAddr)) -> io::Result<u32> {
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
    pub fn tidy_cm_paths(&mut self, now: Time) -> Option<u64> {
        let idle = |(_, (_, used)): &(&_, &(u32, Time))| now.since(*used) >= PATH_IDLE;
        let idle: Vec<_> = self.post.ways.paths.iter().filter(idle).map(|(way, _)| *way).collect();
        for way in idle {
            self.drop_cm_path(way);
        }
        self.post.ways.paths.values().map(|(_, used)| PATH_IDLE - now.since(*used)).min()
    }
}
