//! The paths on which QP1 sends.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use rocinante_netdev::PathSpec;
use rocinante_stack::Allowance;
use rocinante_stack::types::Time;

use super::io::Io;
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

    /// The path of a way, made if there is none. Those for peers of connections (`is_known`) are
    /// not limited: if they were, many peers that are asked at once would seem to be silent.
    pub(super) fn path_to(
        &mut self,
        io: &mut Io,
        now: Time,
        (local, remote): (IpAddr, IpAddr),
        is_known: bool,
    ) -> io::Result<u32> {
        if let Some((path, used)) = self.paths.get_mut(&(local, remote)) {
            *used = now;
            return Ok(*path);
        }
        if !is_known && !self.fresh.take(now) {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        if self.paths.len() >= PATHS_MAX {
            let oldest = self.paths.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(way) = oldest.map(|(way, _)| *way) {
                self.drop_path(io, way);
            }
        }
        let spec = PathSpec { local, remote, src_port: 0xc000, tos: 0, ttl: 64, flow_label: 0 };
        let path = io.add_path(&spec)?;
        self.paths.insert((local, remote), (path, now));
        Ok(path)
    }

    fn drop_path(&mut self, io: &mut Io, way: (IpAddr, IpAddr)) {
        if let Some((path, _)) = self.paths.remove(&way) {
            io.flush();
            io.remove_path(path);
        }
    }

    /// Drops idle paths, so that an idle device has nothing to maintain. Returns the nanoseconds
    /// until the next path may be dropped.
    pub(super) fn tidy(&mut self, io: &mut Io, now: Time) -> Option<u64> {
        let idle = |(_, (_, used)): &(&_, &(u32, Time))| now.since(*used) >= PATH_IDLE;
        let idle: Vec<_> = self.paths.iter().filter(idle).map(|(way, _)| *way).collect();
        for way in idle {
            self.drop_path(io, way);
        }
        self.paths.values().map(|(_, used)| PATH_IDLE - now.since(*used)).min()
    }
}
