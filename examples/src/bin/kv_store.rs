//! A key-value store with tokio. A client *gets* by itself: it READs the server's memory, and the
//! server's program does nothing. It *puts* by a WRITE with immediate data into its inbox at the
//! server, which wakes the server's task; that stores the value, and answers by a SEND.
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
//! The table is an array of slots with open addressing. A READ of a slot that changes meanwhile may
//! be a mix of old and new. So each slot has a checksum; a client that sees a wrong one reads
//! again.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rocinante::asynchronous::{AsyncQp, Part};
use rocinante::cm::{Listener, Params, Request};
use rocinante::verbs::SendOp;
use rocinante::{Access, BufferPool, Context, Mr, Pd, RemoteSlice};
use rocinante_examples::{Args, PORT};

const USAGE: &str = "usage: kv_store serve --bind ADDRESS [--device NAME] [--port P]
       kv_store put  --bind ADDRESS [--device NAME] [--port P] SERVER KEY VALUE
       kv_store get  --bind ADDRESS [--device NAME] [--port P] SERVER KEY
       kv_store demo --bind ADDRESS [--device NAME] [--port P] [--iters N] SERVER";

/// Slots of the table, and bytes of each.
const SLOTS: usize = 512;
const SLOT: usize = 1024;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() {
    let args = Args::read(USAGE);
    let words: Vec<&str> = args.words.iter().map(String::as_str).collect();
    let Some(bind) = args.bind.filter(|_| matches!(words[..], ["serve"] | [_, _, ..])) else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    if let Err(error) = runtime.block_on(run(&args, bind, &words)) {
        eprintln!("kv_store: {error}");
        std::process::exit(1);
    }
}

async fn run(args: &Args, bind: IpAddr, words: &[&str]) -> Result<()> {
    let (ctx, port) = (args.open(bind)?, args.port.unwrap_or(PORT));
    let client = async |server: &str| -> Result<Client> {
        Client::connect(&ctx, SocketAddr::new(server.parse()?, port)).await
    };
    match words {
        ["serve"] => serve(ctx, SocketAddr::new(bind, port)).await,
        ["put", server, key, value] => client(server).await?.put(key, value.as_bytes()).await,
        ["get", server, key] => {
            match client(server).await?.get(key).await? {
                Some(value) => println!("{}", String::from_utf8_lossy(&value)),
                None => println!("there is no {key:?}"),
            }
            Ok(())
        }
        ["demo", server] => {
            let clients = (client(server).await?, client(server).await?);
            demo(clients, args.iters.unwrap_or(200)).await
        }
        _ => Err(USAGE.into()),
    }
}

/// The content of a slot: checksum, lengths of key and value, key, value.
fn encode(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 8];
    bytes.extend((key.len() as u32).to_le_bytes());
    bytes.extend((value.len() as u32).to_le_bytes());
    bytes.extend([key, value].concat());
    let sum = checksum(&bytes[8..]);
    bytes[..8].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The contents of a slot.
#[derive(Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    /// A mix of two values.
    Torn,
    Taken {
        key: Vec<u8>,
        value: Vec<u8>,
    },
}

fn decode(bytes: &[u8]) -> Slot {
    let entry = || {
        let len = |at: usize| Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?) as usize);
        let (key, value) = (len(8)?, len(12)?);
        let content = bytes.get(8..16usize.checked_add(key)?.checked_add(value)?)?;
        let right = checksum(content).to_le_bytes() == bytes[..8];
        let (key, value) = content[8..].split_at(key);
        right.then(|| Slot::Taken { key: key.to_vec(), value: value.to_vec() })
    };
    if bytes.iter().take(16).all(|byte| *byte == 0) {
        Slot::Empty
    } else {
        entry().unwrap_or(Slot::Torn)
    }
}

/// FNV-1a, 64 bits.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Where the slots begin in which a key may be, in order.
fn probe(key: &[u8]) -> impl Iterator<Item = usize> {
    let first = checksum(key) as usize;
    (0..SLOTS).map(move |step| first.wrapping_add(step) % SLOTS * SLOT)
}

/// The table, under a lock for changes. A READ takes none.
struct Table(Mutex<Mr>);

impl Table {
    fn put(&self, entry: &[u8]) -> &'static str {
        let Slot::Taken { key, .. } = decode(entry) else { return "the entry is damaged" };
        let table = self.0.lock().unwrap();
        let mut slots = probe(&key);
        let place = slots.find(|at| match decode(&table.to_vec(*at, SLOT)) {
            Slot::Taken { key: other, .. } => other == key,
            Slot::Empty | Slot::Torn => true,
        });
        let Some(place) = place else { return "the table is full" };
        table.write(place, entry);
        "stored"
    }
}

async fn serve(ctx: Context, address: SocketAddr) -> Result<()> {
    let pd = ctx.alloc_pd();
    let mr = pd.allocate(SLOTS * SLOT, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    let (remote, table) = (mr.remote(), Arc::new(Table(Mutex::new(mr))));
    let listener = Listener::bind(&ctx, address, 64)?;
    println!("{SLOTS} slots of {SLOT} bytes at {address}, {} ({})", ctx.name(), ctx.provider());
    loop {
        let request = listener.accept().await?;
        let (pd, ctx, table, peer) = (pd.clone(), ctx.clone(), table.clone(), request.peer());
        tokio::spawn(async move {
            if let Err(error) = attend(&ctx, &pd, &table, remote, request).await {
                println!("{peer}: {error}");
            }
        });
    }
}

/// Serves one client until it leaves.
async fn attend(
    ctx: &Context,
    pd: &Pd,
    table: &Table,
    remote: RemoteSlice,
    request: Request,
) -> Result<()> {
    let cq = ctx.create_cq(16)?;
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let qp = AsyncQp::new(pd.qp(&cq, &cq).access(access).build()?)?;
    let inbox = pd.allocate(SLOT, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    // A receive for the immediate data; the WRITE itself places the entry.
    let mut put = qp.recv(pd.allocate(8, Access::LOCAL_WRITE)?);
    let mut answer = pd.allocate(64, Access::NONE)?;
    let places = [remote.to_bytes(), inbox.remote().to_bytes()].concat();
    let qp = qp.accept(request, &Params::default().private_data(&places)).await?;
    loop {
        let (received, note) = put.await;
        // The client has left, and its pending receives are flushed.
        let Ok(received) = received else { return Ok(()) };
        put = qp.recv(note);
        let len = received.imm_data().ok_or("a message that is no put")? as usize;
        let entry = inbox.get(0, len).ok_or("an entry longer than the inbox")?.to_vec();
        let text = table.put(&entry);
        answer.write(0, text.as_bytes());
        let (sent, part) = qp.send(Part::new(answer, 0, text.len() as u32)).await;
        sent?;
        answer = part.into_inner();
    }
}

struct Client {
    qp: AsyncQp,
    table: RemoteSlice,
    inbox: RemoteSlice,
    pool: BufferPool,
}

impl Client {
    async fn connect(ctx: &Context, server: SocketAddr) -> Result<Self> {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64)?);
        let pool = BufferPool::new(&pd, 16, SLOT, Access::LOCAL_WRITE)?;
        let qp = AsyncQp::new(pd.qp(&cq, &cq).build()?)?;
        let qp = qp.connect(server, &Params::default()).await?;
        let place = |at: usize| RemoteSlice::from_bytes(qp.private_data().get(at..)?);
        let (Some(table), Some(inbox)) = (place(0), place(20)) else {
            return Err("the server is no kv_store".into());
        };
        Ok(Self { table, inbox, pool, qp })
    }

    /// The value of a key: one READ for each slot that is looked at.
    async fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut slots = probe(key.as_bytes());
        let mut at = slots.next();
        while let Some(slot) = at {
            let remote = self.table.get(slot as u64, SLOT as u64).ok_or("another table")?;
            let buffer = self.pool.take().ok_or("too many gets at a time")?;
            let (read, buffer) = self.qp.read(buffer, remote).await;
            read?;
            match decode(&buffer.slice().to_vec()) {
                Slot::Empty => return Ok(None),
                Slot::Taken { key: found, value } if found == key.as_bytes() => {
                    return Ok(Some(value));
                }
                Slot::Taken { .. } => at = slots.next(),
                Slot::Torn => {}
            }
        }
        Ok(None)
    }

    /// Stores a value. One at a time, because the client has one inbox.
    async fn put(&mut self, key: &str, value: &[u8]) -> Result<()> {
        let entry = encode(key.as_bytes(), value);
        let len = u32::try_from(entry.len())?;
        if entry.len() as u64 > self.inbox.len || entry.len() > SLOT {
            return Err(format!("key and value exceed {} bytes", SLOT - 16).into());
        }
        let buffers = || self.pool.take().ok_or("too many gets at a time");
        let (answer, buffer) = (self.qp.recv(buffers()?), buffers()?);
        buffer.slice().write(&entry);
        let RemoteSlice { address: remote, rkey, .. } = self.inbox;
        let write = SendOp::Write { remote, rkey, imm: Some(len.to_be_bytes()) };
        self.qp.operation(write, Part::new(buffer, 0, len)).await.0?;
        let (received, buffer) = answer.await;
        let text = buffer.slice().slice(0, received?.byte_len as usize).to_vec();
        if text == b"stored" { Ok(()) } else { Err(String::from_utf8_lossy(&text).into()) }
    }
}

/// One client counts, the other watches.
async fn demo((mut writer, reader): (Client, Client), puts: u64) -> Result<()> {
    let key = format!("demo {}", std::process::id());
    println!("one client puts {puts} values of 800 bytes, the other gets them meanwhile");
    let (start, mut gets, mut seen) = (Instant::now(), 0, 0);
    let writing = tokio::spawn({
        let key = key.clone();
        async move {
            for number in 1..=puts {
                writer.put(&key, &number.to_le_bytes().repeat(100)).await?;
            }
            Result::Ok(())
        }
    });
    while !writing.is_finished() {
        if let Some(value) = reader.get(&key).await? {
            let number = u64::from_le_bytes(*value.first_chunk().ok_or("a short value")?);
            if value != number.to_le_bytes().repeat(100) || number < seen {
                return Err(format!("{number} after {seen}: a get mixed two values").into());
            }
            (gets, seen) = (gets + 1, number);
        }
        tokio::task::yield_now().await;
    }
    writing.await??;
    if reader.get(&key).await? != Some(puts.to_le_bytes().repeat(100)) {
        return Err("the last value is not there".into());
    }
    let ms = start.elapsed().as_millis();
    println!("{puts} puts and {gets} gets in {ms} ms, all verified");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_torn_entry_is_noticed() {
        let [old, new] = [1, 2].map(|fill| encode(b"key", &[fill; 100]));
        let taken = |fill: u8| Slot::Taken { key: b"key".to_vec(), value: vec![fill; 100] };
        assert_eq!([decode(&old), decode(&new)], [taken(1), taken(2)]);
        assert_eq!(decode(&[0; SLOT]), Slot::Empty);
        for at in (1..new.len()).filter(|at| new[..*at] != old[..*at]) {
            let torn = [&new[..at], &old[at..]].concat();
            assert_eq!(decode(&torn), Slot::Torn, "at {at}");
        }
        assert!((16..new.len()).all(|len| decode(&new[..len]) == Slot::Torn));
        let absurd = [&[1; 8][..], &[0xff; 8]].concat();
        assert_eq!(decode(&absurd), Slot::Torn);
    }
}
