//! Many connections in one asynchronous program: every message returns to its sender. With tokio,
//! on one thread.
//!
//! In two terminals on one machine, without privileges:
//!
//! ```text
//! cargo run --release -p rocinante-examples --bin async_echo -- --bind 127.0.0.1
//! cargo run --release -p rocinante-examples --bin async_echo -- \
//!     --bind 127.0.0.2 --connections 50 127.0.0.1
//! ```
//!
//! Nothing in rocinante is asynchronous by itself, and nothing has to be. Each blocking call has a
//! counterpart that does not block (`try_request`, `try_finish`, `poll_one`), and a descriptor that
//! is readable when that has a result. [`when_ready`] is all that a reactor needs. Meanwhile a
//! background thread of the device handles the packets.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Instant;

use rocinante::cm::{Connecting, Connection, Listener, Params, Request};
use rocinante::verbs::{SendData, SendOp, WcOpcode};
use rocinante::{
    Access, CompChannel, Context, Cq, Mr, PreparedQp, RecvWr, SendWr, VerbsError, Wc, WcStatus,
};
use rocinante_examples::{Args, PORT};
use tokio::io::unix::AsyncFd;
use tokio::task::{JoinSet, LocalSet, spawn_local};

const USAGE: &str = "usage: async_echo --bind ADDRESS [--port P] [--connections N] [--iters N] [--size BYTES] [SERVER]

The server is started without SERVER, and ends after N connections if --connections is given. The client makes N connections (10) and
sends N messages (100) on each.";

/// The longest message.
const SIZE_MAX: usize = 65_536;

fn main() {
    let args = Args::read(USAGE);
    let Some(bind) = args.bind else {
        eprintln!("--bind: which of this machine's addresses?\n\n{USAGE}");
        std::process::exit(2);
    };
    if let Err(error) = run(bind, &args) {
        eprintln!("async_echo: {error}");
        std::process::exit(1);
    }
}

fn run(bind: IpAddr, args: &Args) -> Result<(), VerbsError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let port = args.port.unwrap_or(PORT);
    let ctx = args.open(bind)?;
    let both = LocalSet::new();
    match args.words.first() {
        None => both.block_on(&runtime, serve(ctx, SocketAddr::new(bind, port), args.connections)),
        Some(server) => {
            let ip = server.parse();
            let ip = ip.map_err(|_| VerbsError::Invalid(format!("{server:?} is no address")))?;
            let (connections, iters) = (args.connections.unwrap_or(10), args.iters.unwrap_or(100));
            let size = args.size.unwrap_or(1000).clamp(1, SIZE_MAX);
            both.block_on(&runtime, ask(ctx, SocketAddr::new(ip, port), connections, iters, size))
        }
    }
}

/// Makes the reactor watch a descriptor.
// It requires that the descriptor stays the same and open as long as its owner lives, and each of
// ours does. Its replacement is unsafe.
#[allow(deprecated)]
fn watched<F: AsRawFd>(owner: F) -> Result<AsyncFd<F>, VerbsError> {
    Ok(AsyncFd::new(owner)?)
}

/// Waits until `look` finds something: calls it whenever the descriptor has become readable.
async fn when_ready<F: AsRawFd, T>(
    fd: &AsyncFd<F>,
    mut look: impl FnMut(&F) -> Result<Option<T>, VerbsError>,
) -> Result<T, VerbsError> {
    loop {
        let mut readable = fd.readable().await?;
        if let Some(found) = look(fd.get_ref())? {
            return Ok(found);
        }
        // Later events are announced again.
        readable.clear_ready();
    }
}

/// Waits until a connection is established, from either side.
async fn made(mut connecting: Connecting) -> Result<Connection, VerbsError> {
    let fd = watched(connecting.notifier()?)?;
    when_ready(&fd, |_| connecting.try_finish()).await
}

/// Accepts every client, and serves all at the same time.
async fn serve(ctx: Context, address: SocketAddr, count: Option<u64>) -> Result<(), VerbsError> {
    let listener = watched(Listener::bind(&ctx, address, 128)?)?;
    println!("listening on {address}");
    let (alive, most) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let mut serving = JoinSet::new();
    let mut accepted = 0;
    while count.is_none_or(|count| accepted < count) {
        let request = when_ready(&listener, |listener| listener.try_request()).await?;
        accepted += 1;
        let (ctx, alive, most) = (ctx.clone(), alive.clone(), most.clone());
        serving.spawn_local(async move {
            let peer = request.peer();
            alive.set(alive.get() + 1);
            most.set(most.get().max(alive.get()));
            if let Err(error) = serve_one(&ctx, request).await {
                println!("{peer}: {error}");
            }
            alive.set(alive.get() - 1);
        });
        // Ended connections need no memory.
        while serving.try_join_next().is_some() {}
    }
    while serving.join_next().await.is_some() {}
    println!("served {accepted} connections, {} at a time at most", most.get());
    Ok(())
}

async fn serve_one(ctx: &Context, request: Request) -> Result<(), VerbsError> {
    let (queue, qp) = Queue::new(ctx, SIZE_MAX)?;
    let connection = made(request.accept(qp, &Params::default())?).await?;
    // The buffer of an answer belongs to the device until the answer has completed: the next
    // message waits for that.
    let (mut answering, mut waiting) = (false, None);
    loop {
        let wc = queue.next().await?;
        // When the peer has gone, posted requests complete with an error.
        if wc.status != WcStatus::Success {
            return Ok(());
        }
        if wc.opcode == WcOpcode::Recv {
            waiting = Some(queue.received(wc.byte_len as usize));
        } else {
            answering = false;
        }
        if let Some(message) = waiting.take_if(|_| !answering) {
            // The next message may come as soon as this one is answered.
            queue.receive_more(&connection)?;
            queue.send(&connection, &message)?;
            answering = true;
        }
    }
}

/// Makes all connections, and uses them at the same time.
async fn ask(
    ctx: Context,
    server: SocketAddr,
    connections: u64,
    iters: u64,
    size: usize,
) -> Result<(), VerbsError> {
    let start = Instant::now();
    let tasks: Vec<_> = (0..connections)
        .map(|number| {
            let ctx = ctx.clone();
            spawn_local(async move { ask_one(&ctx, server, number, iters, size).await })
        })
        .collect();
    for task in tasks {
        task.await.map_err(|error| VerbsError::Invalid(error.to_string()))??;
    }
    let us = start.elapsed().as_secs_f64() * 1e6 / (connections * iters).max(1) as f64;
    println!(
        "{connections} connections, {iters} messages of {size} bytes there and back on each, all verified: {us:.2} µs each"
    );
    Ok(())
}

async fn ask_one(
    ctx: &Context,
    server: SocketAddr,
    number: u64,
    iters: u64,
    size: usize,
) -> Result<(), VerbsError> {
    let (queue, qp) = Queue::new(ctx, size)?;
    let connection = made(Connecting::start(qp, server, &Params::default())?).await?;
    for iter in 0..iters {
        let message = vec![(number * 31 + iter) as u8; size];
        queue.send(&connection, &message)?;
        // Two requests complete, the receive last: the answer comes after the message has arrived.
        for _ in 0..2 {
            let wc = queue.next().await?;
            if wc.status != WcStatus::Success {
                return Err(VerbsError::Invalid(format!("a request ended in {}", wc.status)));
            }
        }
        if queue.received(size) != message {
            return Err(VerbsError::Invalid(format!("message {iter} is not what was sent")));
        }
        queue.receive_more(&connection)?;
    }
    connection.disconnect()?;
    let fd = watched(connection.notifier()?)?;
    when_ready(&fd, |_| Ok(connection.is_disconnected().then_some(()))).await
}

/// Completions of one connection, and the memory of its messages: one to send, and one to receive.
struct Queue {
    cq: Cq,
    channel: AsyncFd<CompChannel>,
    outgoing: Mr,
    incoming: Mr,
}

impl Queue {
    /// Also prepares a queue pair that takes a message as soon as it is connected.
    fn new(ctx: &Context, size: usize) -> Result<(Self, PreparedQp), VerbsError> {
        let channel = ctx.create_comp_channel()?;
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq_with(8, &channel)?);
        let outgoing = pd.allocate(size, Access::NONE)?;
        let incoming = pd.allocate(size, Access::LOCAL_WRITE)?;
        let qp = pd.qp(&cq, &cq).max_send_wr(4).max_recv_wr(1).build()?;
        qp.post_recv(&[RecvWr { wr_id: 0, sges: &[incoming.sge(0, size)] }])?;
        Ok((Self { cq, channel: watched(channel)?, outgoing, incoming }, qp))
    }

    fn received(&self, len: usize) -> Vec<u8> {
        self.incoming.to_vec(0, len)
    }

    fn receive_more(&self, connection: &Connection) -> Result<(), VerbsError> {
        let sges = [self.incoming.sge(0, self.incoming.len())];
        Ok(connection.post_recv(&[RecvWr { wr_id: 0, sges: &sges }])?)
    }

    fn send(&self, connection: &Connection, message: &[u8]) -> Result<(), VerbsError> {
        self.outgoing.write(0, message);
        let (op, sges) = (SendOp::Send { imm: None }, [self.outgoing.sge(0, message.len())]);
        let data = SendData::Sges(&sges);
        let wr = SendWr::new(op, data).wr_id(1);
        Ok(connection.post_send(&[wr])?)
    }

    /// The next completion.
    async fn next(&self) -> Result<Wc, VerbsError> {
        loop {
            if let Some(wc) = self.cq.poll_one()? {
                return Ok(wc);
            }
            self.cq.req_notify(false)?;
            // Completions from before that call are not announced.
            if let Some(wc) = self.cq.poll_one()? {
                return Ok(wc);
            }
            when_ready(&self.channel, |channel| Ok(channel.try_event().map(|_| ()))).await?;
        }
    }
}
