//! What librdmacm asks about an id.

use std::net::SocketAddr;

use rocinante_soft::model::qp::ConnectOptions;
use rocinante_stack::types::Mtu;

use super::id::{Held, Id, Phase};
use super::words::{Out, SOCKADDR_IN6, STORAGE, length};
use super::{Answer, Command, Outcome};
use crate::convert;

/// The default partition key.
const PKEY: u16 = u16::MAX;
/// `IBV_RATE_10_GBPS`, the rate of a path where nothing says more.
const RATE: u8 = 3;
/// The longest life of a packet: 4.096 µs · 2^16, as Linux says of RoCE.
const LIFETIME: u8 = 16;

impl Held {
    /// The longest life of a packet, a code: half the ACK timeout that the program has set.
    fn lifetime(&self) -> u8 {
        self.ack_timeout.and_then(|code| code.checked_sub(1)).unwrap_or(LIFETIME)
    }

    /// The ACK timeout that a request names for both queue pairs, a code: as the kernel's, of which
    /// few retries outlast a peer that gets no processor.
    pub(super) fn ack_timeout(&self) -> u8 {
        self.lifetime() + 1
    }
}

impl Command<'_> {
    pub(super) fn query_route(&self) -> Outcome<Answer> {
        /// The least room that a program must give: all but the device's index.
        const LEAST: usize = 200;
        self.needs(LEAST)?;
        let id = self.id(8)?;
        let held = id.held.lock();
        let (guid, index) = device(&held);
        let paths = number_of_paths(&held);
        let out = Out::default().bytes(&guid);
        let out = route(out, &held, id.facts.lock().route.map(|route| route.mtu));
        let out = out.zeroes(64).address(held.local, SOCKADDR_IN6).address(held.peer, SOCKADDR_IN6);
        let out = out.u32(paths).u8(port(&held)).zeroes(3).u32(index).u32(0);
        Ok(self.answer(out))
    }

    pub(super) fn query(&self) -> Outcome<Answer> {
        let id = self.id(8)?;
        match self.body.u32(12) {
            0 => self.query_addr(&id),
            1 => self.query_path(&id),
            2 => self.query_gid(&id),
            _ => Err(libc::ENOSYS),
        }
    }

    fn query_addr(&self, id: &Id) -> Outcome<Answer> {
        self.needs(LEAST_ADDR)?;
        let held = id.held.lock();
        let sizes = (length(held.local), length(held.peer));
        let out = addresses(&held, sizes);
        let out = out.address(held.local, STORAGE).address(held.peer, STORAGE);
        Ok(self.answer(out.u32(device(&held).1).u32(0)))
    }

    fn query_gid(&self, id: &Id) -> Outcome<Answer> {
        /// `struct sockaddr_ib`.
        const SIZE: u16 = 48;
        self.needs(LEAST_ADDR)?;
        let held = id.held.lock();
        let ip = |address: Option<SocketAddr>| address.map(|address| address.ip());
        let out = addresses(&held, (SIZE, SIZE));
        let out = out.address_ib(ip(held.local)).address_ib(ip(held.peer));
        Ok(self.answer(out.u32(device(&held).1).u32(0)))
    }

    fn query_path(&self, id: &Id) -> Outcome<Answer> {
        /// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
        const FLAGS: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;
        self.needs(8)?;
        let held = id.held.lock();
        let paths = number_of_paths(&held);
        let out = Out::default().u32(paths).u32(0);
        if paths == 0 {
            return Ok(self.answer(out));
        }
        let mtu = id.facts.lock().route.map(|route| route.mtu);
        let gid = |address: Option<SocketAddr>| address.map_or([0; 16], |it| convert::gid(it.ip()));
        // The record as InfiniBand's subnet administration packs it: big-endian.
        let out = out
            .u32(FLAGS)
            .u32(0)
            // service_id
            .zeroes(8)
            .bytes(&gid(held.peer))
            .bytes(&gid(held.local))
            // dlid, slid; flow label and hop limit
            .zeroes(4)
            .bytes(&u32::from(ConnectOptions::default().hop_limit).to_be_bytes())
            .u8(held.tos)
            // reversible, one path
            .u8(0x81)
            .u16(PKEY)
            // qos_class, sl
            .zeroes(2)
            // Each with a selector of two bits: exactly so.
            .u8(2 << 6 | mtu_of(&held, mtu))
            .u8(2 << 6 | RATE)
            .u8(2 << 6 | held.lifetime())
            // preference
            .u8(0)
            .zeroes(6);
        Ok(self.answer(out))
    }
}

/// The least room that a program must give: all but the device's index.
const LEAST_ADDR: usize = 272;

/// The beginning of `struct rdma_ucm_query_addr_resp`.
fn addresses(held: &Held, (local, peer): (u16, u16)) -> Out {
    let out = Out::default().bytes(&device(held).0).u8(port(held)).u8(0);
    out.u16(PKEY).u16(local).u16(peer)
}

/// The GUID and the index of the device; 0 and a number that none has for a wildcard.
fn device(held: &Held) -> ([u8; 8], u32) {
    held.found.as_ref().map_or(([0; 8], u32::MAX), |found| (found.guid(), found.index))
}

fn port(held: &Held) -> u8 {
    u8::from(held.found.is_some())
}

/// One, once there is a route.
fn number_of_paths(held: &Held) -> u32 {
    let none = matches!(
        held.phase,
        Phase::Idle
            | Phase::Bound
            | Phase::AddrQuery(_)
            | Phase::AddrResolved
            | Phase::Listening(_)
    );
    u32::from(!none && held.peer.is_some())
}

fn mtu_of(held: &Held, mtu: Option<Mtu>) -> u8 {
    let link = held.found.as_ref().map(crate::devices::Found::mtu);
    let mtu = mtu.or(link).map_or(0, convert::mtu_code);
    u8::try_from(mtu).unwrap_or(0)
}

/// `struct ib_user_path_rec` of an id, whose addresses it has before there is a route.
fn route(out: Out, held: &Held, mtu: Option<Mtu>) -> Out {
    let gid = |address: Option<SocketAddr>| address.map_or([0; 16], |it| convert::gid(it.ip()));
    out.bytes(&gid(held.peer))
        .bytes(&gid(held.local))
        // dlid, slid, raw_traffic, flow_label
        .zeroes(12)
        // reversible
        .u32(1)
        .u32(mtu_of(held, mtu).into())
        .u16(PKEY)
        .u8(ConnectOptions::default().hop_limit)
        .u8(held.tos)
        // numb_path, sl; the selectors mean exactly so
        .u8(1)
        .u8(0)
        .u8(2)
        .u8(2)
        .u8(RATE)
        .u8(2)
        .u8(held.lifetime())
        // preference
        .u8(0)
}
