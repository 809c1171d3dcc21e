//! A key-value store that its clients read and write directly: the server's program does nothing
//! meanwhile.
//!
//! In two terminals on one machine, without privileges:
//!
//! ```text
//! cargo run --release -p rocinante-examples --bin kv_store -- serve --bind 127.0.0.1
//! cargo run --release -p rocinante-examples --bin kv_store -- \
//!     put --bind 127.0.0.2 127.0.0.1 colour red
//! cargo run --release -p rocinante-examples --bin kv_store -- \
//!     get --bind 127.0.0.2 127.0.0.1 colour
//! cargo run --release -p rocinante-examples --bin kv_store -- demo --bind 127.0.0.2 127.0.0.1
//! ```
//!
//! The table is a region of the server's memory, an array of slots with open addressing. A *get* is
//! an RDMA READ of a slot. A *put* takes the slot's lock with an atomic compare-and-swap, reads the
//! slot, WRITEs the new content, and WRITEs the lock free again. On one reliable connection WRITEs
//! are placed in the order in which they were posted.
//!
//! A get takes no lock, so it may read a slot while a put writes it: READ and WRITE are atomic for
//! no more than an aligned word. Therefore each slot carries a checksum over all its content, and a
//! version. A get with a wrong checksum has seen a torn slot, and reads again.
//!
//! The server gives each client a number, which the client writes into a lock. When a client's
//! connection ends, the server frees the locks that the client left behind, and buries a slot that
//! it left half written.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{Key, Mtu, SendData, SendOp};
use rocinante::{Access, ConnectOptions, Context, Cq, Mr, Pd, Qp, SendWr, VerbsError, WcStatus};
use rocinante_examples::{Args, PORT};

const USAGE: &str = "usage: kv_store serve --bind ADDRESS [--device NAME] [--port P]
       kv_store put  --bind ADDRESS [--device NAME] [--port P] SERVER KEY VALUE
       kv_store get  --bind ADDRESS [--device NAME] [--port P] SERVER KEY
       kv_store demo --bind ADDRESS [--device NAME] [--port P] [--iters N] SERVER";

fn main() {
    let args = Args::read(USAGE);
    let words: Vec<&str> = args.words.iter().map(String::as_str).collect();
    let done = match (args.bind, words.as_slice()) {
        (Some(bind), ["serve"]) => args
            .open(bind)
            .and_then(|ctx| serve(&ctx, SocketAddr::new(bind, args.port.unwrap_or(PORT)))),
        (Some(bind), ["put", server, key, value]) => connect(&args, bind, server)
            .and_then(|store| store.put(key, value.as_bytes()))
            .map(|version| println!("version {version}")),
        (Some(bind), ["get", server, key]) => {
            connect(&args, bind, server).and_then(|store| store.get(key)).map(|found| match found {
                Some(entry) => println!("{}", String::from_utf8_lossy(&entry.value)),
                None => println!("there is no {key:?}"),
            })
        }
        (Some(bind), ["demo", server]) => demo(&args, bind, server),
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
    };
    if let Err(error) = done {
        eprintln!("kv_store: {error}");
        std::process::exit(1);
    }
}

/// Slots of the table.
const SLOTS: usize = 512;
/// Bytes of a slot.
const SLOT: usize = 2048;
/// The lock is the first word: 0 if it is free, else the number of the client that holds it.
const LOCK: usize = 0;
/// Checksum, version, and the lengths of key and value follow, eight bytes each; then the key and
/// the value.
const CONTENT: usize = 8;

/// The content of a slot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Entry {
    /// Counts the puts into this slot; 0 if it is empty.
    version: u64,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Entry {
    /// The content of a slot, from [`CONTENT`] on: only as long as key and value need.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        bytes.extend(self.version.to_le_bytes());
        bytes.extend((self.key.len() as u64).to_le_bytes());
        bytes.extend((self.value.len() as u64).to_le_bytes());
        bytes.extend(&self.key);
        bytes.extend(&self.value);
        let checksum = checksum(&bytes[8..]);
        bytes[..8].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads the content of a slot; `None` if it is torn.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        let (version, key_len, value_len) = (word(8)?, word(16)?, word(24)?);
        if version == 0 && word(0)? == 0 {
            return Some(Self::default());
        }
        let (key_len, value_len) =
            (usize::try_from(key_len).ok()?, usize::try_from(value_len).ok()?);
        let key_end = key_len.checked_add(32)?;
        let end = key_end.checked_add(value_len)?;
        let whole = bytes.get(8..end).is_some_and(|rest| Some(checksum(rest)) == word(0));
        whole.then(|| Self {
            version,
            key: bytes[32..key_end].to_vec(),
            value: bytes[key_end..end].to_vec(),
        })
    }
}

/// FNV-1a, 64 bits.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Serves clients for ever: hands out the table and cleans up after each client that disconnects.
fn serve(ctx: &Context, address: SocketAddr) -> Result<(), VerbsError> {
    let pd = ctx.alloc_pd();
    let access =
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let table = Arc::new(pd.allocate(SLOTS * SLOT, access)?);
    let listener = TcpListener::bind(address)?;
    println!(
        "{SLOTS} slots of {SLOT} bytes at {address}, device {} ({})",
        ctx.name(),
        ctx.provider()
    );
    for number in 1.. {
        let exchange = Exchange::accept_from(&listener)?;
        let (ctx, pd, table) = (ctx.clone(), pd.clone(), table.clone());
        std::thread::spawn(move || {
            let peer = exchange.peer();
            println!("client {number} from {peer}");
            let ended = attend(&ctx, &pd, &table, exchange, number);
            println!("client {number} has gone ({})", ended.unwrap_err());
            clean_up(&table, number);
        });
    }
    Ok(())
}

/// Connects a client and waits until it disconnects.
fn attend(
    ctx: &Context,
    pd: &Pd,
    table: &Mr,
    mut exchange: Exchange,
    number: u64,
) -> Result<std::convert::Infallible, VerbsError> {
    let cq = ctx.create_cq(1)?;
    let qp = pd.qp(&cq, &cq).access(Access::ALL).build()?;
    let hello = Hello {
        endpoints: vec![qp.endpoint()],
        regions: vec![table.remote()],
        note: number.to_string(),
    };
    let peer = exchange.swap(&hello)?;
    let peer = peer.endpoints.first().ok_or(invalid("no queue pair"))?;
    // From now on the device serves this client without this program.
    let _qp = qp.connect(peer, &options())?;
    exchange.barrier("connected")?;
    exchange.set_patience(None);
    loop {
        exchange.hear()?;
    }
}

/// Frees the locks that a client left. The clients' atomics and ours work on the same words.
fn clean_up(table: &Mr, number: u64) {
    for slot in (0..SLOTS * SLOT).step_by(SLOT) {
        let lock = table.word(slot + LOCK);
        if lock.load(Ordering::Acquire) == number {
            if Entry::from_bytes(&table.to_vec(slot + CONTENT, SLOT - CONTENT)).is_none() {
                // Not empty: otherwise keys that were put after this one would not be found any
                // more.
                let tombstone = Entry { version: 1, ..Entry::default() };
                table.write(slot + CONTENT, &tombstone.to_bytes());
            }
            lock.store(0, Ordering::Release);
            println!("client {number} left slot {} locked: freed", slot / SLOT);
        }
    }
}

/// Small packets, so that a slot takes several: then gets and puts really overlap.
///
/// The server is a process too: if many programs want the processor, its device may not run for a
/// second. By default a peer that is silent for half a second is given up; this timeout is eight
/// times as long.
fn options() -> ConnectOptions {
    ConnectOptions::default().mtu(Some(Mtu::Mtu256)).timeout(18)
}

/// A client's connection to the table.
struct Store {
    qp: Qp,
    cq: Cq,
    /// Memory for transfers: one slot to read into, and one to write from.
    scratch: Mr,
    table: u64,
    rkey: Key,
    number: u64,
    torn: AtomicU64,
    _exchange: Exchange,
}

fn connect(args: &Args, bind: IpAddr, server: &str) -> Result<Store, VerbsError> {
    Store::connect(&args.open(bind)?, args, server)
}

/// The most attempts of a client to get a lock, or a whole slot.
const TRIES: usize = 100_000;

impl Store {
    fn connect(ctx: &Context, args: &Args, server: &str) -> Result<Self, VerbsError> {
        let server = server.parse().map_err(|_| invalid("SERVER is no address"))?;
        let server = SocketAddr::new(server, args.port.unwrap_or(PORT));
        let mut exchange = Exchange::connect(server, Duration::from_secs(5))?;
        let pd = ctx.alloc_pd();
        let cq = ctx.create_cq(8)?;
        let qp = pd.qp(&cq, &cq).access(Access::ALL).build()?;
        let scratch = pd.allocate(2 * SLOT, Access::LOCAL_WRITE)?;
        let hello = Hello { endpoints: vec![qp.endpoint()], ..Hello::default() };
        let peer = exchange.swap(&hello)?;
        let ([endpoint], [table]) = (&peer.endpoints[..], &peer.regions[..]) else {
            return Err(invalid("the server is no kv_store"));
        };
        let number = peer.note.parse().map_err(|_| invalid("the server gave no number"))?;
        if table.len != (SLOTS * SLOT) as u64 {
            return Err(invalid("the server's table has another size"));
        }
        let qp = qp.connect(endpoint, &options())?;
        exchange.barrier("connected")?;
        let (table, rkey, torn) = (table.address, table.rkey, AtomicU64::new(0));
        Ok(Self { qp, cq, scratch, table, rkey, number, torn, _exchange: exchange })
    }

    /// The value of a key.
    fn get(&self, key: &str) -> Result<Option<Entry>, VerbsError> {
        Ok(self.find(key)?.map(|(_, entry)| entry))
    }

    /// The slot of a key, and its content.
    fn find(&self, key: &str) -> Result<Option<(usize, Entry)>, VerbsError> {
        for slot in probe(key) {
            let entry = self.read_whole(slot)?;
            if entry.version == 0 {
                return Ok(None);
            }
            if entry.key == key.as_bytes() {
                return Ok(Some((slot, entry)));
            }
        }
        Ok(None)
    }

    /// Stores a value; returns the version of the slot.
    fn put(&self, key: &str, value: &[u8]) -> Result<u64, VerbsError> {
        self.update(key, |_| value.to_vec())
    }

    /// Replaces the value of a key (empty if there is none) by the result of `change`. No other
    /// put comes in between.
    fn update(&self, key: &str, change: impl Fn(&[u8]) -> Vec<u8>) -> Result<u64, VerbsError> {
        if key.is_empty() {
            return Err(invalid("a key has at least one byte"));
        }
        for slot in probe(key) {
            self.lock(slot)?;
            let old = self.read_whole(slot)?;
            if old.version != 0 && old.key != key.as_bytes() {
                self.write(slot, &[], true)?;
                continue;
            }
            let (version, value) = (old.version + 1, change(&old.value));
            let entry = Entry { version, key: key.as_bytes().to_vec(), value };
            let bytes = entry.to_bytes();
            if CONTENT + bytes.len() > SLOT {
                self.write(slot, &[], true)?;
                return Err(invalid(&format!("key and value exceed {SLOT} bytes")));
            }
            self.write(slot, &bytes, true)?;
            return Ok(version);
        }
        Err(invalid("the table is full"))
    }

    /// Reads a slot until it is not torn.
    fn read_whole(&self, slot: usize) -> Result<Entry, VerbsError> {
        for _ in 0..TRIES {
            if let Some(entry) = self.read(slot)? {
                return Ok(entry);
            }
            self.torn.fetch_add(1, Ordering::Relaxed);
        }
        Err(invalid(&format!("slot {slot} stays torn: its writer has stopped half way")))
    }

    /// Reads a slot once; `None` if it is torn.
    fn read(&self, slot: usize) -> Result<Option<Entry>, VerbsError> {
        let remote = self.table + (slot * SLOT + CONTENT) as u64;
        let sge = [self.scratch.sge(0, SLOT - CONTENT)];
        self.post(&[(SendOp::Read { remote, rkey: self.rkey }, SendData::Sges(&sge))])?;
        Ok(Entry::from_bytes(&self.scratch.to_vec(0, SLOT - CONTENT)))
    }

    /// Takes the lock of a slot.
    fn lock(&self, slot: usize) -> Result<(), VerbsError> {
        let remote = self.table + (slot * SLOT + LOCK) as u64;
        let op = SendOp::CompareSwap { remote, rkey: self.rkey, compare: 0, swap: self.number };
        let sge = [self.scratch.sge(0, 8)];
        for _ in 0..TRIES {
            self.post(&[(op, SendData::Sges(&sge))])?;
            // The previous value: 0 means that the lock is ours now.
            if self.scratch.load_u64(0) == 0 {
                return Ok(());
            }
        }
        Err(invalid(&format!("slot {slot} stays locked")))
    }

    /// Writes the content of a locked slot, and then, with `unlock`, frees its lock.
    fn write(&self, slot: usize, content: &[u8], unlock: bool) -> Result<(), VerbsError> {
        let start = self.table + (slot * SLOT) as u64;
        let (rkey, imm) = (self.rkey, None);
        self.scratch.write(SLOT, content);
        let sge = [self.scratch.sge(SLOT, content.len())];
        let content_op = SendOp::Write { remote: start + CONTENT as u64, rkey, imm };
        let unlock_op = SendOp::Write { remote: start + LOCK as u64, rkey, imm };
        let mut list = Vec::new();
        if !content.is_empty() {
            list.push((content_op, SendData::Sges(&sge[..])));
        }
        if unlock {
            list.push((unlock_op, SendData::Inline(&[0; 8])));
        }
        self.post(&list)
    }

    /// Posts requests and waits for the last one, which completes only after all others.
    fn post(&self, list: &[(SendOp, SendData<'_>)]) -> Result<(), VerbsError> {
        let last = list.len() - 1;
        let list = (0..).zip(list).map(|(index, (op, data))| {
            SendWr::new(*op, *data).wr_id(index).signaled(index == last as u64)
        });
        self.qp.post_send(&list.collect::<Vec<_>>())?;
        let wc = self.cq.wait_one(Duration::from_secs(20))?;
        match wc.status {
            WcStatus::Success => Ok(()),
            status => Err(invalid(&format!("the server: {status}"))),
        }
    }
}

/// The possible slots of a key, in order: up to the first empty one.
fn probe(key: &str) -> impl Iterator<Item = usize> {
    let first = checksum(key.as_bytes()) as usize % SLOTS;
    (0..SLOTS).map(move |step| (first + step) % SLOTS)
}

/// Verifies the store against itself: three connections at once, and a writer that stops halfway.
fn demo(args: &Args, bind: IpAddr, server: &str) -> Result<(), VerbsError> {
    let iters = args.iters.unwrap_or(2000);
    let ctx = args.open(bind)?;
    let stores = [(); 3].map(|()| Store::connect(&ctx, args, server));
    let [a, b, reader] = stores;
    let (a, b, reader) = (a?, b?, reader?);
    let run = format!("{bind}/{}", a.number);

    for number in 0..100 {
        a.put(&format!("{run}/key {number}"), format!("value {number}").as_bytes())?;
    }
    for number in 0..100 {
        let found = b.get(&format!("{run}/key {number}"))?.map(|entry| entry.value);
        ensure(
            found == Some(format!("value {number}").into_bytes()),
            "a value is not what was put",
        )?;
    }
    ensure(b.get(&format!("{run}/no such key"))?.is_none(), "a key that nobody put was found")?;
    println!("100 keys put and got");

    half_a_put(&a, &b, &format!("{run}/half"))?;
    println!("a slot half written is noticed as torn");

    let key = format!("{run}/counter");
    let gets = race(&a, &b, &reader, &key, iters)?;
    let last = reader.get(&key)?.ok_or(invalid("the counter is gone"))?;
    ensure(counter(&last.value) == Some(2 * iters), "updates were lost")?;
    ensure(last.version == 2 * iters, "versions were lost")?;
    let torn: u64 = [&a, &b, &reader].iter().map(|store| store.torn.load(Ordering::Relaxed)).sum();
    println!(
        "2 x {iters} updates under locks, none lost; {gets} gets meanwhile, all whole; {torn} torn reads repeated"
    );
    println!("all verified");
    Ok(())
}

/// A put that stops halfway must not look like a value, neither the old nor the new.
fn half_a_put(writer: &Store, other: &Store, key: &str) -> Result<(), VerbsError> {
    writer.put(key, &[b'o'; 1000])?;
    let (slot, _) = other.find(key)?.ok_or(invalid("the key is nowhere"))?;
    let new = Entry { version: 2, key: key.into(), value: vec![b'n'; 1000] }.to_bytes();
    writer.lock(slot)?;
    writer.write(slot, &new[..new.len() / 2], false)?;
    ensure(other.read(slot)?.is_none(), "half a put was taken for a value")?;
    writer.write(slot, &new, true)?;
    let found = other.get(key)?.map(|entry| (entry.version, entry.value));
    ensure(found == Some((2, vec![b'n'; 1000])), "the whole put is not there")
}

/// Two writers count in one value, while a reader reads. Returns the number of reads.
fn race(a: &Store, b: &Store, reader: &Store, key: &str, iters: u64) -> Result<u64, VerbsError> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers = [a, b].map(|store| {
            scope.spawn(move || (0..iters).try_for_each(|_| store.update(key, counted).map(drop)))
        });
        let looking = scope.spawn(|| {
            let (mut gets, mut before) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                if let Some(entry) = reader.get(key)? {
                    let count = counter(&entry.value);
                    ensure(count == Some(entry.version), "a get mixed two values")?;
                    ensure(entry.version >= before, "a get went back in time")?;
                    before = entry.version;
                    gets += 1;
                }
            }
            Ok(gets)
        });
        let written = writers.map(|writer| writer.join().expect("a writer"));
        done.store(true, Ordering::Relaxed);
        let gets = looking.join().expect("the reader");
        written.into_iter().collect::<Result<(), _>>()?;
        gets
    })
}

/// A value that repeats one number, so that a mix of two values shows.
fn counted(old: &[u8]) -> Vec<u8> {
    (counter(old).unwrap_or(0) + 1).to_le_bytes().repeat(150)
}

fn counter(value: &[u8]) -> Option<u64> {
    let first = u64::from_le_bytes(*value.first_chunk()?);
    value.chunks(8).all(|word| word == first.to_le_bytes()).then_some(first)
}

fn ensure(holds: bool, otherwise: &str) -> Result<(), VerbsError> {
    if holds { Ok(()) } else { Err(invalid(otherwise)) }
}

fn invalid(what: &str) -> VerbsError {
    VerbsError::Invalid(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_torn_content_is_noticed() {
        let entry = |fill: u8| Entry { version: 3, key: b"key".to_vec(), value: vec![fill; 100] };
        let (old, new) = (entry(1).to_bytes(), entry(2).to_bytes());
        assert_eq!(Entry::from_bytes(&new), Some(entry(2)));
        assert_eq!(Entry::from_bytes(&[0; SLOT - CONTENT]), Some(Entry::default()));
        for at in (1..new.len()).filter(|at| new[..*at] != old[..*at]) {
            let torn: Vec<u8> = new[..at].iter().chain(&old[at..]).copied().collect();
            assert_eq!(Entry::from_bytes(&torn), None, "at {at}");
        }
        for len in 0..32 {
            assert_eq!(Entry::from_bytes(&new[..len]), None);
        }
    }

    #[test]
    fn what_a_client_left_locked_is_freed() {
        let (here, there) = rocinante::doc::addresses();
        let server = SocketAddr::new(there, PORT);
        std::thread::spawn(move || serve(&Context::open(there)?, server));
        let ctx = Context::open(here).unwrap();
        let connect = || Store::connect(&ctx, &Args::default(), &there.to_string()).unwrap();
        let (dying, living) = (connect(), connect());
        let slot = probe("key").next().unwrap();
        dying.lock(slot).unwrap();
        let half = Entry { version: 1, key: b"key".to_vec(), value: b"lost".to_vec() }.to_bytes();
        dying.write(slot, &half[..20], false).unwrap();
        assert_eq!(living.read(slot).unwrap(), None);
        drop(dying);
        assert_eq!(living.put("key", b"value").unwrap(), 1);
        let (found, entry) = living.find("key").unwrap().unwrap();
        assert_eq!((found, entry.value), ((slot + 1) % SLOTS, b"value".to_vec()));
    }
}
