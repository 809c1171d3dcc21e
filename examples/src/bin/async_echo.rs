//! Many connections in one asynchronous program: every message returns to its sender. With tokio,
//! on one thread; rocinante's futures run on any runtime.
//!
//! In two terminals on one machine, without privileges:
//!
//! ```text
//! cargo run --release -p rocinante-examples --bin async_echo -- --bind 127.0.0.1
//! cargo run --release -p rocinante-examples --bin async_echo -- \
//!     --bind 127.0.0.2 --connections 50 127.0.0.1
//! ```

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use rocinante::asynchronous::{AsyncQp, Part};
use rocinante::cm::{Listener, Params, Request};
use rocinante::{Access, Context, Pd, PreparedQp, VerbsError};
use rocinante_examples::{Args, PORT};
use tokio::task::JoinSet;

const USAGE: &str = "usage: async_echo --bind ADDRESS [--port P] [--connections N] [--iters N] [--size BYTES] [SERVER]

The server is started without SERVER, and ends after N connections if --connections is given. The client makes N connections (10) and
sends N messages (100) on each.";

/// The longest message.
const SIZE_MAX: usize = 65_536;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

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

fn run(bind: IpAddr, args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let port = args.port.unwrap_or(PORT);
    let ctx = args.open(bind)?;
    match args.words.first() {
        None => runtime.block_on(serve(ctx, SocketAddr::new(bind, port), args.connections)),
        Some(server) => {
            let server = SocketAddr::new(server.parse()?, port);
            let (connections, iters) = (args.connections.unwrap_or(10), args.iters.unwrap_or(100));
            let size = args.size.unwrap_or(1000).clamp(1, SIZE_MAX);
            runtime.block_on(ask(ctx, server, connections, iters, size))
        }
    }
}

/// Accepts every client, and serves all at the same time.
async fn serve(ctx: Context, address: SocketAddr, count: Option<u64>) -> Result<()> {
    let listener = Listener::bind(&ctx, address, 128)?;
    println!("listening on {address}");
    let (mut serving, mut accepted, mut most) = (JoinSet::new(), 0, 0);
    while count.is_none_or(|count| accepted < count) {
        let request = listener.accept().await?;
        accepted += 1;
        let (ctx, peer) = (ctx.clone(), request.peer());
        // Ended connections need no memory.
        while serving.try_join_next().is_some() {}
        serving.spawn(async move {
            if let Err(error) = serve_one(&ctx, request).await {
                println!("{peer}: {error}");
            }
        });
        most = most.max(serving.len());
    }
    while serving.join_next().await.is_some() {}
    println!("served {accepted} connections, {most} at a time at most");
    Ok(())
}

async fn serve_one(ctx: &Context, request: Request) -> Result<()> {
    let pd = ctx.alloc_pd();
    let qp = queue_pair(ctx, &pd)?;
    let mut spare = pd.allocate(SIZE_MAX, Access::LOCAL_WRITE)?;
    // The client may send as soon as it is connected.
    let mut next = qp.recv(pd.allocate(SIZE_MAX, Access::LOCAL_WRITE)?);
    let qp = qp.accept(request, &Params::default()).await?;
    // When the client has gone, requests in flight end with an error.
    while let (Ok(received), message) = next.await {
        next = qp.recv(spare);
        let (sent, part) = qp.send(Part::new(message, 0, received.byte_len)).await;
        sent?;
        spare = part.into_inner();
    }
    Ok(())
}

/// Makes all connections, and uses them at the same time.
async fn ask(
    ctx: Context,
    server: SocketAddr,
    connections: u64,
    iters: u64,
    size: usize,
) -> Result<()> {
    let start = Instant::now();
    let mut asking = JoinSet::new();
    for number in 0..connections {
        let ctx = ctx.clone();
        asking.spawn(async move { ask_one(&ctx, server, number, iters, size).await });
    }
    while let Some(done) = asking.join_next().await {
        done??;
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
) -> Result<()> {
    let pd = ctx.alloc_pd();
    let qp = queue_pair(ctx, &pd)?.connect(server, &Params::default()).await?;
    let mut outgoing = pd.allocate(size, Access::NONE)?;
    let mut incoming = pd.allocate(size, Access::LOCAL_WRITE)?;
    for iter in 0..iters {
        let message = vec![(number * 31 + iter) as u8; size];
        outgoing.write(0, &message);
        let answer = qp.recv(incoming);
        let (sent, received);
        (sent, outgoing) = qp.send(outgoing).await;
        sent?;
        (received, incoming) = answer.await;
        received?;
        if incoming.to_vec(0, size) != message {
            return Err(format!("message {iter} differs from the one sent").into());
        }
    }
    qp.disconnect()?;
    qp.disconnected().await;
    Ok(())
}

/// A queue pair for one connection, with a completion queue of its own.
fn queue_pair(ctx: &Context, pd: &Pd) -> std::result::Result<AsyncQp<PreparedQp>, VerbsError> {
    let cq = ctx.create_cq(8)?;
    AsyncQp::new(pd.qp(&cq, &cq).max_send_wr(4).max_recv_wr(2).build()?)
}
