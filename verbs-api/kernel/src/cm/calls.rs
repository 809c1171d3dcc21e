//! The program's calls to the connection manager.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rocinante_soft::model::cm::UDP_QKEY;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::mailbox::Mailbox;
use rocinante_soft::provider::manager::{Breaks, Chosen, ListensTo, Manager, Place, WithMailbox};
use rocinante_soft::provider::wake;
use rocinante_stack::cm::{
    Accept, CmError, ConnId, Connect, ListenerId, QpSide, SidrQueryId, SidrReqId,
};
use rocinante_stack::types::Qpn;
use rocinante_stack::wire::cm::{RejReason, SidrStatus, Transport};
use rustix::io::Errno;

use super::super::ffi::rdmacm::{Id, OPTION_ID_ACK_TIMEOUT, OPTION_ID_TOS, Path, Service, Terms};
use super::super::{Device, convert, error};
use super::{
    Conn, FINDING, Listening, Query, Question, Shared, Stage, conn_id, listener_id, number_of,
    query_id,
};

/// The packet lifetime if the program sets none: 4.096 µs · 2^16, as in Linux.
const LIFETIME: u8 = 16;

/// The room for the program's private data in each message (IBTA volume 1, 12.6 \[M\]). In
/// requests, `rdma_cm` takes 36 bytes of it.
mod room {
    pub(super) const REQ: usize = 92 - 36;
    pub(super) const REP: usize = 196;
    pub(super) const REJ: usize = 148;
    pub(super) const SIDR_REQ: usize = 216 - 36;
    pub(super) const SIDR_REP: usize = 136;
}

impl Manager for Device {
    fn listen(&self, place: Place, to: ListensTo) -> WithMailbox<ListenerId> {
        match to {
            ListensTo::Connections => {
                self.listen_to(&[Service::Reliable, Service::Unreliable], place)
            }
            ListensTo::Datagrams => self.listen_to(&[Service::Datagrams], place),
        }
    }

    /// The program still decides about requests that it has taken; dropping the others rejects
    /// them.
    fn unlisten(&self, listener: ListenerId, _to: ListensTo) {
        let Some(cm) = self.begun() else { return };
        let mut table = cm.table.lock();
        let Some(gone) = table.listeners.remove(&number_of(listener)) else { return };
        let requests = gone.mailbox.numbers();
        let conns: Vec<_> =
            requests.iter().filter_map(|number| table.conns.remove(number)).collect();
        let asks: Vec<_> = requests.iter().filter_map(|number| table.asks.remove(number)).collect();
        drop(table);
        drop((gone, conns, asks));
    }

    fn connect(&self, ask: &Connect<'_>, qp: Option<Weak<dyn Breaks>>) -> WithMailbox<ConnId> {
        fits(ask.private, room::REQ)?;
        let service = match ask.transport {
            Transport::Uc => Service::Unreliable,
            _ => Service::Reliable,
        };
        let port = ask.service.port().map_or(0, |(_, port)| port);
        let question = Question {
            terms: Terms { retry_count: ask.retry_count.min(7), ..terms(&ask.side) },
            private: ask.private.to_vec(),
            // The kernel has no option for a path MTU below the link's, but it accepts a complete
            // path.
            path: (ask.mtu < self.active_mtu).then(|| Path {
                local: convert::gid(ask.local),
                remote: convert::gid(ask.remote),
                mtu: convert::mtu_number(ask.mtu),
                lifetime: if ask.ack_timeout == 0 { LIFETIME } else { ask.ack_timeout - 1 },
                traffic_class: ask.traffic_class,
                hop_limit: ask.hop_limit,
            }),
        };
        let cm = self.cm()?;
        let mut table = cm.table()?;
        let number = table.number();
        let id = cm.find(number, service, ask.local, SocketAddr::new(ask.remote, port), |id| {
            if ask.traffic_class != 0 {
                id.set_option(OPTION_ID_TOS, ask.traffic_class)?;
            }
            // Linux before 5.3 does not know this option, and uses 2 s.
            match (service, id.set_option(OPTION_ID_ACK_TIMEOUT, ask.ack_timeout)) {
                (Service::Reliable, Err(error)) if !is_unknown(&error) => Err(error),
                _ => Ok(()),
            }
        })?;
        let mailbox = Arc::new(Mailbox::default());
        let stage = Stage::Finding(Box::new(question));
        let conn = Conn { id, stage, mailbox: mailbox.clone(), qp, chosen: None };
        table.conns.insert(number, conn);
        Ok((conn_id(number), mailbox))
    }

    fn chosen(&self, conn: ConnId) -> Option<Chosen> {
        self.begun()?.table.lock().conn(conn).ok()?.chosen
    }

    fn accept(
        &self,
        conn: ConnId,
        accept: &Accept<'_>,
        qp: Option<Weak<dyn Breaks>>,
    ) -> Result<Arc<Mailbox>, VerbsError> {
        fits(accept.private, room::REP)?;
        let cm = self.cm()?;
        let mut table = cm.table.lock();
        let conn = table.conn(conn)?;
        let Stage::Requested(listener) = conn.stage else { return Err(CmError::State.into()) };
        let accepted = conn.id.accept(&terms(&accept.side), accept.private);
        accepted.map_err(|error| call_failed("rdma_accept", error))?;
        conn.stage = Stage::Accepted(listener);
        conn.mailbox = Arc::new(Mailbox::default());
        conn.qp = qp;
        Ok(conn.mailbox.clone())
    }

    fn reject(&self, conn: ConnId, _reason: RejReason, private: &[u8]) -> Result<(), VerbsError> {
        fits(private, room::REJ)?;
        let cm = self.cm()?;
        let gone = cm.table.lock().conns.remove(&conn.0.0).ok_or(CmError::Unknown)?;
        gone.id.reject(private).map_err(|error| call_failed("rdma_reject", error))
    }

    fn establish(&self, conn: ConnId) -> Result<(), VerbsError> {
        let cm = self.cm()?;
        let mut table = cm.table.lock();
        let conn = table.conn(conn)?;
        conn.id.establish().map_err(|error| call_failed("rdma_establish", error))?;
        conn.stage = Stage::Established;
        Ok(())
    }

    fn flush(&self) {}

    fn disconnect(&self, conn: ConnId) -> Result<(), VerbsError> {
        let Some(cm) = self.begun() else { return Ok(()) };
        match cm.table.lock().conn(conn) {
            Ok(conn) => {
                conn.id.disconnect().map_err(|error| error::failed("rdma_disconnect", error))
            }
            Err(_) => Ok(()),
        }
    }

    fn forget(&self, conn: ConnId) {
        let Some(cm) = self.begun() else { return };
        let mut table = cm.table.lock();
        if let Ok(conn) = table.conn(conn)
            && matches!(conn.stage, Stage::Established)
            && conn.id.disconnect().is_ok()
        {
            // The connection stays until the peer has answered.
            conn.stage = Stage::Leaving;
            return;
        }
        let gone = table.conns.remove(&conn.0.0);
        drop(table);
        drop(gone);
    }

    fn answer(
        &self,
        ask: SidrReqId,
        answer: Result<(Qpn, u32), SidrStatus>,
        private: &[u8],
    ) -> Result<(), VerbsError> {
        fits(private, room::SIDR_REP)?;
        if answer.is_ok_and(|(_, qkey)| qkey != UDP_QKEY) {
            let why = format!(
                "the kernel's connection manager tells peers no other Q_Key than {UDP_QKEY:#x}: make the queue pair with \
                 `qkey(cm::UDP_QKEY)`"
            );
            return Err(VerbsError::Invalid(why));
        }
        let gone = self.cm()?.table.lock().asks.remove(&ask.0);
        let id = gone.ok_or(CmError::Unknown)?;
        match answer {
            Ok((qpn, _)) => {
                let terms = Terms { qp_num: qpn.value(), ..Terms::default() };
                id.accept(&terms, private).map_err(|error| call_failed("rdma_accept", error))
            }
            Err(_) => id.reject(private).map_err(|error| call_failed("rdma_reject", error)),
        }
    }

    fn resolve(&self, local: IpAddr, peer: SocketAddr, private: &[u8]) -> WithMailbox<SidrQueryId> {
        fits(private, room::SIDR_REQ)?;
        let cm = self.cm()?;
        let mut table = cm.table()?;
        let number = table.number();
        let id = cm.find(number, Service::Datagrams, local, peer, |_| Ok(()))?;
        let mailbox = Arc::new(Mailbox::default());
        let question = Question { terms: Terms::default(), private: private.to_vec(), path: None };
        table.queries.insert(number, Query { id, mailbox: mailbox.clone(), question });
        Ok((query_id(number), mailbox))
    }

    fn forget_query(&self, query: SidrQueryId) {
        let Some(cm) = self.begun() else { return };
        let gone = cm.table.lock().queries.remove(&query.0);
        drop(gone);
    }

    fn wait(&self, mailbox: &Mailbox, until: Option<Instant>) -> io::Result<()> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        wake::wait(None, mailbox.fd()?, left);
        Ok(())
    }
}

impl Device {
    /// Listens at the addresses of the place.
    fn listen_to(&self, services: &[Service], place: Place) -> WithMailbox<ListenerId> {
        let addresses = addresses(&self.name, &self.gids, &place)?;
        let cm = self.cm()?;
        let mut table = cm.table()?;
        let number = table.number();
        let mut ids = Vec::new();
        for address in addresses {
            for service in services {
                let address = SocketAddr::new(address, place.port);
                let id = cm.bind(number, *service, address)?;
                id.listen(place.backlog).map_err(|error| error::cannot_bind(address, error))?;
                ids.push(id);
            }
        }
        let mailbox = Arc::new(Mailbox::default());
        let backlog = place.backlog.max(1);
        table.listeners.insert(number, Listening { _ids: ids, mailbox: mailbox.clone(), backlog });
        Ok((listener_id(number), mailbox))
    }
}

impl Shared {
    /// Starts finding a peer, from an address of the device.
    fn find(
        &self,
        number: u32,
        service: Service,
        local: IpAddr,
        peer: SocketAddr,
        options: impl FnOnce(&Id) -> io::Result<()>,
    ) -> Result<Id, VerbsError> {
        if local.is_ipv4() != peer.is_ipv4() {
            return Err(CmError::Family.into());
        }
        let id = self.bind(number, service, SocketAddr::new(local, 0))?;
        options(&id).map_err(|error| error::failed("rdma_set_option", error))?;
        id.resolve_addr(peer, FINDING).map_err(error::no_way)?;
        Ok(id)
    }
}

/// The addresses of a device at which a listener of this place listens: the one, or all that are
/// not link-local. Error: there is none.
fn addresses(name: &str, gids: &[IpAddr], place: &Place) -> Result<Vec<IpAddr>, VerbsError> {
    let is_one = place.address.is_some_and(|address| !address.is_unspecified());
    let beyond_link = |address: &IpAddr| match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    let takes = |address: &&IpAddr| place.covers(address) && (is_one || beyond_link(address));
    let found: Vec<IpAddr> = gids.iter().filter(takes).copied().collect();
    if found.is_empty() {
        let all = place.address.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        let why = format!("{name} has no address for {all}, not counting link-local ones");
        return Err(VerbsError::Invalid(format!("{why}: see `rocinante devices`")));
    }
    Ok(found)
}

/// The parameters of our queue pair for the kernel.
fn terms(side: &QpSide) -> Terms {
    Terms {
        responder_resources: side.responder_resources,
        initiator_depth: side.initiator_depth,
        rnr_retry_count: side.rnr_retry.min(7),
        srq: side.srq,
        qp_num: side.qpn.value(),
        ..Terms::default()
    }
}

fn fits(private: &[u8], max: usize) -> Result<(), CmError> {
    if private.len() > max { Err(CmError::PrivateTooLong { max }) } else { Ok(()) }
}

/// Whether this kernel does not know an option.
fn is_unknown(error: &io::Error) -> bool {
    [Errno::NOSYS, Errno::INVAL]
        .map(|errno| Some(errno.raw_os_error()))
        .contains(&error.raw_os_error())
}

/// If the peer no longer waits, the kernel reports a wrong state of the connection.
fn call_failed(call: &str, error: io::Error) -> VerbsError {
    if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) {
        CmError::Unknown.into()
    } else {
        error::failed(call, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_at_the_addresses_of_its_place() {
        let all = ["fe80::1", "fd00::1", "10.0.0.1", "fd00::2"];
        let ips =
            |from: &[&str]| from.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
        let found = |gids: &[&str], at: Option<&str>| {
            let address = at.map(|at| at.parse().unwrap());
            addresses("mlx5_0", &ips(gids), &Place { address, port: 7471, backlog: 1 })
        };
        for (gids, at, expected) in [
            (&all[..], None, &all[1..]),
            (&all, Some("0.0.0.0"), &all[2..3]),
            (&all, Some("fd00::2"), &all[3..]),
            (&all, Some("fe80::1"), &all[..1]),
        ] {
            assert_eq!(found(gids, at).unwrap(), ips(expected), "{gids:?} {at:?}");
        }
        for (gids, at, word) in [
            (&all[..2], Some("0.0.0.0"), "mlx5_0 has no address for 0.0.0.0"),
            (&all[..1], None, "mlx5_0 has no address for ::"),
        ] {
            let why = found(gids, at).unwrap_err().to_string();
            assert!(why.contains(word), "{why}");
        }
    }
}
