//! The kernel's `rdma_cm` (`/dev/infiniband/rdma_cm`, version 4 of its interface) as librdmacm sees
//! it, over this project's connection manager. `rdma/rdma_user_cm.h` has the commands, `ucma.c` and
//! `cma.c` of Linux their meaning.
//!
//! A command is a write: bytes come in, an errno or bytes for the program's memory go out. Nothing
//! here touches memory of the program but by [`Memory`].

mod address;
mod connect;
mod devices;
mod event;
mod group;
mod id;
mod options;
mod ports;
mod query;
mod removal;
mod resolving;
mod table;
#[cfg(test)]
mod tests;
mod words;

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rocinante_stack::verbs::QpType;

use self::devices::Devices;
pub(crate) use self::event::File;
use self::id::{Held, Id, Phase};
use self::ports::Ports;
use self::resolving::Resolving;
use self::table::Table;
use self::words::{In, Out};
use crate::devices::Found;
use crate::log::{Level, say};
use crate::plain::{Manager as _, PortSpace};

/// A value, or the errno.
pub(crate) type Outcome<T> = Result<T, c_int>;

/// The result of a command, and its place in the program's memory.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) to: u64,
    pub(crate) bytes: Vec<u8>,
}

/// The program's memory, of which commands name addresses.
pub(crate) trait Memory {
    /// # Errors
    /// `EFAULT` unless `len` bytes can be read, or written if `writable`.
    fn check(&self, at: u64, len: usize, writable: bool) -> Outcome<()>;

    /// Copies `len` bytes. Error: as [`check`](Self::check).
    fn load(&self, at: u64, len: usize) -> Outcome<Vec<u8>>;
}

/// All that a process has opened.
#[derive(Default)]
pub(crate) struct Ucma {
    files: RwLock<HashMap<c_int, Arc<File>>>,
    table: Arc<Table>,
    ports: Mutex<Ports>,
    devices: Devices,
    resolving: Resolving,
}

/// The header of a command.
pub(crate) const HEADER: usize = 8;

/// How long a command is that begins with this header.
pub(crate) fn announced(header: &[u8]) -> usize {
    HEADER + usize::from(In(header).u16(4))
}

/// Whether the command of this header waits: GET_EVENT, where there is no event. No other does.
pub(crate) fn waits(header: &[u8]) -> bool {
    const GET_EVENT: u32 = 12;
    In(header).u32(0) == GET_EVENT
}

type Execute = fn(&Command<'_>) -> Outcome<Answer>;

/// The commands, in the order of their numbers.
const COMMANDS: [(&str, Execute); 23] = [
    ("CREATE_ID", |it| it.create()),
    ("DESTROY_ID", |it| it.destroy()),
    ("BIND_IP", |it| it.bind_ip()),
    ("RESOLVE_IP", |it| it.resolve_ip()),
    ("RESOLVE_ROUTE", |it| it.resolve_route()),
    ("QUERY_ROUTE", |it| it.query_route()),
    ("CONNECT", |it| it.connect()),
    ("LISTEN", |it| it.listen()),
    ("ACCEPT", |it| it.accept()),
    ("REJECT", |it| it.reject()),
    ("DISCONNECT", |it| it.disconnect()),
    ("INIT_QP_ATTR", |it| it.init_qp_attr()),
    ("GET_EVENT", |it| it.get_event()),
    // The kernel does not have it either.
    ("GET_OPTION", |_| Err(libc::ENOSYS)),
    ("SET_OPTION", |it| it.set_option()),
    ("NOTIFY", |it| it.notify()),
    ("JOIN_IP_MCAST", |it| it.join_ip()),
    ("LEAVE_MCAST", |it| it.leave()),
    ("MIGRATE_ID", |it| it.migrate()),
    ("QUERY", |it| it.query()),
    ("BIND", |it| it.bind()),
    ("RESOLVE_ADDR", |it| it.resolve_addr()),
    ("JOIN_MCAST", |it| it.join()),
];

impl Ucma {
    /// One that reaches no other devices.
    pub(crate) fn with_devices(these: Vec<Found>) -> Self {
        Self { devices: Devices::only(these), ..Self::default() }
    }

    /// The numbers of files, ids, groups and ports.
    pub(crate) fn counts(&self) -> [usize; 4] {
        let (ids, groups) = self.table.counts();
        [self.files.read().len(), ids, groups, self.ports.lock().count()]
    }

    /// Opens the file. Returns the program's descriptor.
    pub(crate) fn open(&self) -> Outcome<c_int> {
        let file = File::new()?;
        let fd = file.number().ok_or(libc::EBADF)?;
        self.files.write().insert(fd, Arc::new(file));
        Ok(fd)
    }

    pub(crate) fn has(&self, fd: c_int) -> bool {
        self.files.read().contains_key(&fd)
    }

    pub(crate) fn file(&self, fd: c_int) -> Option<Arc<File>> {
        self.files.read().get(&fd).cloned()
    }

    /// Closes the file, which destroys its ids. `false` if it is none of ours.
    pub(crate) fn close(&self, fd: c_int) -> bool {
        let mut files = self.files.write();
        let Some(file) = files.remove(&fd) else { return false };
        // A command that comes now finds no file here, and no descriptor.
        file.close();
        drop(files);
        self.clear(&file);
        true
    }

    /// Destroys the ids of a file that is closed, and closes the devices behind the last file.
    fn clear(&self, file: &Arc<File>) {
        self.table.ids_of(Some(file)).iter().for_each(|id| {
            self.destroy(id);
        });
        // No file is opened meanwhile.
        let files = self.files.write();
        if files.is_empty() {
            self.ports.lock().leave(None);
            self.devices.close();
        }
    }

    /// Ends all connections: the program ends.
    pub(crate) fn end(&self) {
        self.table.ids_of(None).iter().for_each(|id| {
            self.destroy(id);
        });
    }

    /// Executes a command. One that makes something, or takes an event, does so only if the
    /// program's memory takes the answer. Error: the kernel's; `EAGAIN` if there is no event to
    /// get. An unknown command is `ENOSYS` for every number, where the kernel returns `EINVAL`
    /// behind the end of its table.
    pub(crate) fn command(
        self: &Arc<Self>,
        file: &Arc<File>,
        bytes: &[u8],
        memory: &dyn Memory,
    ) -> Outcome<Answer> {
        let Some((header, body)) = bytes.split_at_checked(HEADER) else { return Err(libc::EINVAL) };
        let header = In(header);
        let (number, len, room) = (header.u32(0), header.u16(4), header.u16(6));
        let known = usize::try_from(number).ok().and_then(|number| COMMANDS.get(number));
        let (name, execute) = known.ok_or(libc::ENOSYS)?;
        let body = body.get(..usize::from(len)).ok_or(libc::EINVAL)?;
        let command = Command { it: self, file, body: In(body), room: room.into(), memory };
        let done = execute(&command);
        // It was closed meanwhile: what the command has made or brought goes, too.
        if file.number().is_none() {
            self.clear(file);
        }
        done.inspect_err(|errno| {
            if !(*errno == libc::EAGAIN && waits(bytes)) {
                let error = std::io::Error::from_raw_os_error(*errno);
                say(Level::Info, format_args!("rdma_cm: {name}: {error}"));
            }
        })
    }

    /// Destroys an id. Returns the number of its events that the program has read.
    fn destroy(&self, id: &Arc<Id>) -> u32 {
        self.table.remove(id.number);
        let mut held = id.held.lock();
        self.leave_phase(id, &mut held);
        for group in held.groups.drain(..) {
            self.table.remove_group(group.number);
        }
        held.opened = None;
        drop(held);
        let mut facts = id.facts.lock();
        facts.is_alive = false;
        let file = facts.file.clone();
        drop(facts);
        let (unread, reported) = file.take(|event| Arc::ptr_eq(&event.of, id), &id.reported);
        for child in unread.into_iter().filter_map(|event| event.child) {
            self.destroy(&child);
        }
        reported
    }

    /// Ends the id's pending operation.
    fn leave_phase(&self, id: &Id, held: &mut Held) {
        let phase = std::mem::replace(&mut held.phase, Phase::Destroyed);
        let device = held.opened.as_ref().map(|opened| &opened.device);
        match (phase, device) {
            (Phase::Listening(places), _) => {
                for (opened, listener) in places {
                    opened.device.unlisten(listener, id.service_of(held));
                }
            }
            (Phase::Requested(conn) | Phase::Connected(conn), Some(device)) => device.forget(conn),
            (Phase::Asked(ask), Some(device)) => {
                let _ = device.answer(ask, Err(crate::plain::SidrStatus::REJECT), &[]);
            }
            (Phase::Querying(query), Some(device)) => device.forget_query(query),
            _ => {}
        }
        if held.has_port
            && let Some(local) = held.local
        {
            self.ports.lock().release(id.space, local.port(), id.number);
        }
    }
}

/// A command in the making.
struct Command<'a> {
    it: &'a Arc<Ucma>,
    file: &'a Arc<File>,
    body: In<'a>,
    /// Bytes of room that the program has for the answer.
    room: usize,
    memory: &'a dyn Memory,
}

impl Command<'_> {
    /// # Errors
    /// As [`Table::find`]; `ENXIO` if its device is gone.
    fn id(&self, at: usize) -> Outcome<Arc<Id>> {
        let id = self.it.table.find(self.body.u32(at), self.file)?;
        if id.facts.lock().is_removed { Err(libc::ENXIO) } else { Ok(id) }
    }

    /// # Errors
    /// `ENOSPC` if the program has less room.
    fn needs(&self, room: usize) -> Outcome<()> {
        if self.room < room { Err(libc::ENOSPC) } else { Ok(()) }
    }

    /// The answer, for the address that stands at the beginning of most commands.
    fn answer(&self, out: Out) -> Answer {
        let mut bytes = out.0;
        bytes.truncate(self.room);
        Answer { to: self.body.u64(0), bytes }
    }

    fn create(&self) -> Outcome<Answer> {
        self.needs(4)?;
        let space = match self.body.u16(16) {
            0x0106 => PortSpace::Tcp,
            0x0111 => PortSpace::Udp,
            0x0002 => PortSpace::IpOverIb,
            0x013f => PortSpace::Ib,
            _ => return Err(libc::EINVAL),
        };
        let qp_type = match (space, self.body.u8(18)) {
            (PortSpace::Tcp, _) | (PortSpace::Ib, 2) => QpType::Rc,
            (PortSpace::Udp | PortSpace::IpOverIb, _) | (PortSpace::Ib, 4) => QpType::Ud,
            (PortSpace::Ib, 3) => QpType::Uc,
            _ => return Err(libc::EINVAL),
        };
        let (of, to) = ((self.body.u64(0), self.file.clone()), self.body.u64(8));
        self.memory.check(to, 4, true)?;
        let id = self.it.table.make((space, qp_type), of, |_, _| {})?;
        Ok(Answer { to, bytes: Out::default().u32(id.number).0 })
    }

    fn destroy(&self) -> Outcome<Answer> {
        self.needs(4)?;
        let id = self.it.table.find(self.body.u32(8), self.file)?;
        Ok(self.answer(Out::default().u32(self.it.destroy(&id))))
    }

    fn get_event(&self) -> Outcome<Answer> {
        let to = self.body.u64(0);
        let bytes = self.file.read(self.room, |len| self.memory.check(to, len, true))?;
        Ok(Answer { to, bytes })
    }

    /// The id's events come to this file from now on.
    fn migrate(&self) -> Outcome<Answer> {
        self.needs(4)?;
        let from = c_int::try_from(self.body.u32(12)).ok().and_then(|fd| self.it.file(fd));
        let from = from.ok_or(libc::EINVAL)?;
        let id = self.it.table.find(self.body.u32(8), &from)?;
        let mut facts = id.facts.lock();
        let (events, reported) = from.take(|event| Arc::ptr_eq(&event.of, &id), &id.reported);
        facts.file = self.file.clone();
        for event in events {
            // The program will find the new id where it reads of it.
            if let Some(child) = &event.child {
                child.facts.lock().file = self.file.clone();
            }
            self.file.push(event);
        }
        Ok(self.answer(Out::default().u32(reported)))
    }
}
