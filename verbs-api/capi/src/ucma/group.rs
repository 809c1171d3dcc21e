//! Multicast groups. The queue pair joins when librdmacm attaches it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use rocinante_stack::types::Qpn;

use super::event::{Event, Group, Kind, Param};
use super::id::{Id, Phase};
use super::words::{Out, SOCKADDR_IN6};
use super::{Answer, Command, Outcome};

impl Command<'_> {
    pub(super) fn join_ip(&self) -> Outcome<Answer> {
        let id = self.id(16 + SOCKADDR_IN6)?;
        self.join_group(&id, self.body.address(16)?.ip()?)
    }

    pub(super) fn join(&self) -> Outcome<Answer> {
        /// `RDMA_MC_JOIN_FLAG_RESERVED`, the first that means nothing.
        const FLAGS_END: u16 = 2;
        let id = self.id(16)?;
        if self.body.u16(22) >= FLAGS_END {
            return Err(libc::EINVAL);
        }
        self.join_group(&id, self.body.address(24)?.ip()?)
    }

    fn join_group(&self, id: &Arc<Id>, group: SocketAddr) -> Outcome<Answer> {
        self.needs(4)?;
        let mut held = id.held.lock();
        let has_device =
            matches!(held.phase, Phase::Bound | Phase::AddrResolved | Phase::RouteResolved);
        if !has_device || !id.is_of_datagrams() || group.ip().is_unspecified() {
            return Err(libc::EINVAL);
        }
        id.open(&mut held, self.it)?;
        let ah = held.ah(group.ip())?;
        self.memory.check(self.body.u64(0), 4, true)?;
        let uid = self.body.u64(8);
        let joined = self.it.table.make_group(|number| Group {
            number,
            uid,
            id: id.clone(),
            reported: AtomicU32::new(0),
        })?;
        held.groups.push(joined.clone());
        let (qpn, qkey) = (Qpn::MULTICAST.value(), held.qkey);
        let param = Param { qpn, qkey, ah, ..Param::default() };
        let number = joined.number;
        let event = Event {
            of: id.clone(),
            kind: Kind::MulticastJoin,
            status: 0,
            param,
            child: None,
            group: Some(joined),
        };
        id.facts.lock().file.push(event);
        Ok(self.answer(Out::default().u32(number)))
    }

    pub(super) fn leave(&self) -> Outcome<Answer> {
        self.needs(4)?;
        let group = self.it.table.group(self.body.u32(8))?;
        let file = group.id.facts.lock().file.clone();
        if !Arc::ptr_eq(&file, self.file) {
            return Err(libc::EINVAL);
        }
        self.it.table.remove_group(group.number);
        group.id.held.lock().groups.retain(|other| !Arc::ptr_eq(other, &group));
        let is_its =
            |event: &Event| event.group.as_ref().is_some_and(|other| Arc::ptr_eq(other, &group));
        let (_, reported) = file.take(is_its, &group.reported);
        Ok(self.answer(Out::default().u32(reported)))
    }
}
