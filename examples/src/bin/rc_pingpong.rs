//! A message goes back and forth over a reliable connection: the smallest complete program.
//!
//! In two terminals on one machine, without privileges:
//!
//! ```text
//! cargo run --release -p rocinante-examples --bin rc_pingpong -- --bind 127.0.0.1
//! cargo run --release -p rocinante-examples --bin rc_pingpong -- --bind 127.0.0.2 127.0.0.1
//! ```
//!
//! The steps, with the names of libibverbs: open a device, allocate a protection domain, register
//! memory, create a completion queue and a queue pair; tell the peer the queue pair's address,
//! number and first PSN; connect; post work and poll for its completion.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rocinante::{
    Access, ConnectOptions, Cq, Endpoint, Exchange, Hello, Mr, Qp, RecvWr, SendWr, VerbsError,
    WcStatus,
};
use rocinante_examples::{Args, PORT};

const USAGE: &str = "usage: rc_pingpong --bind ADDRESS [--device NAME] [--port P] [--iters N] [--size BYTES] [SERVER]

The server is started without SERVER; the client with the server's address. Give both the same --iters and --size.";

fn main() {
    let args = Args::read(USAGE);
    let Some(bind) = args.bind else {
        eprintln!("--bind: which of this machine's addresses?\n\n{USAGE}");
        std::process::exit(2);
    };
    if let Err(error) = run(bind, &args) {
        eprintln!("rc_pingpong: {error}");
        std::process::exit(1);
    }
}

fn run(bind: IpAddr, args: &Args) -> Result<(), VerbsError> {
    let (iters, size) = (args.iters.unwrap_or(1000), args.size.unwrap_or(4096).max(1));

    // A device is a network interface with the backend that carries its packets, or one of the
    // kernel's devices (--device rxe0). Here it is the one with our address.
    let ctx = args.open(bind)?;
    println!("device {} ({})", ctx.name(), ctx.provider());

    // Regions and queue pairs that work together belong to one protection domain.
    let pd = ctx.alloc_pd();
    // The memory of the messages. The peer never addresses this memory itself, so it needs no
    // remote rights. An incoming message is written into it, so it needs the local write right.
    let outgoing = pd.allocate(size, Access::NONE)?;
    let incoming = pd.allocate(size, Access::LOCAL_WRITE)?;
    // Completions of sends and of receives may share a queue. Here each has its own, so that the
    // program can wait for each.
    let (sent, received) = (ctx.create_cq(4)?, ctx.create_cq(4)?);
    let qp = pd.qp(&sent, &received).build()?;

    // A receive must be posted before the peer sends, or the peer's first message waits. So it is
    // posted before the peer even knows this queue pair.
    qp.post_recv(&[RecvWr { wr_id: 0, sges: &[incoming.sge(0, size)] }])?;

    // How two queue pairs learn about each other is up to the programs. This small exchange over
    // TCP is one way.
    let port = args.port.unwrap_or(PORT);
    let server = args.words.first();
    let mut exchange = match server {
        None => {
            println!("waiting on TCP port {port}");
            Exchange::accept(SocketAddr::new(bind, port))?
        }
        Some(host) => Exchange::connect(parse(host, port)?, Duration::from_secs(5))?,
    };
    let hello = Hello { endpoints: vec![qp.endpoint()], ..Hello::default() };
    let peer = exchange.swap(&hello)?;
    let [peer] = peer.endpoints[..] else {
        return Err(VerbsError::Invalid("the peer has not one queue pair".into()));
    };
    print_endpoint("local", &qp.endpoint());
    print_endpoint("remote", &peer);

    // Through RTR to RTS. On failure the error also returns the queue pair, which is of no use
    // here.
    let qp = qp.connect(&peer, &ConnectOptions::default())?;
    // Neither side sends before both can receive.
    exchange.barrier("connected")?;

    let player = Player { qp, sent, received, outgoing, incoming, size };
    let start = Instant::now();
    for number in 0..iters {
        if server.is_some() {
            player.send(number)?;
            player.receive(number)?;
        } else {
            player.receive(number)?;
            player.send(number)?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    // The peer may still wait for the acknowledgement of its last message, and only an open device
    // sends it.
    exchange.barrier("done")?;
    let us = seconds * 1e6 / iters as f64;
    println!("{iters} messages of {size} bytes there and back, all verified: {us:.2} µs each");
    Ok(())
}

struct Player {
    qp: Qp,
    sent: Cq,
    received: Cq,
    outgoing: Mr,
    incoming: Mr,
    size: usize,
}

impl Player {
    /// Sends message `number` and waits until the peer has received it.
    fn send(&self, number: u64) -> Result<(), VerbsError> {
        // The region is ours again after the completion of the previous message.
        self.outgoing.write(0, &vec![letter(number); self.size]);
        self.qp.post_send(&[SendWr::send(&[self.outgoing.sge(0, self.size)]).wr_id(number)])?;
        wait(&self.sent)
    }

    /// Waits for message `number` and verifies it.
    fn receive(&self, number: u64) -> Result<(), VerbsError> {
        wait(&self.received)?;
        let message = self.incoming.to_vec(0, self.size);
        if message.iter().any(|byte| *byte != letter(number)) {
            return Err(VerbsError::Invalid(format!("message {number} is not what was sent")));
        }
        // Prepares for the next one.
        self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[self.incoming.sge(0, self.size)] }])?;
        Ok(())
    }
}

/// Waits for the next completion of a queue: polls, and thereby drives the device on this thread.
fn wait(cq: &Cq) -> Result<(), VerbsError> {
    let wc = cq.wait_one(Duration::from_secs(10))?;
    match wc.status {
        WcStatus::Success => Ok(()),
        // RETRY_EXC_ERR: the peer does not answer; WR_FLUSH_ERR: the connection broke before.
        status => Err(VerbsError::Invalid(format!("request {} ended in {status}", wc.wr_id))),
    }
}

fn letter(number: u64) -> u8 {
    b'a' + (number % 26) as u8
}

fn parse(host: &str, port: u16) -> Result<SocketAddr, VerbsError> {
    let address =
        host.parse().map_err(|_| VerbsError::Invalid(format!("{host:?} is no address")))?;
    Ok(SocketAddr::new(address, port))
}

fn print_endpoint(whose: &str, endpoint: &Endpoint) {
    println!("  {whose}: address {}, QPN {}, PSN {}", endpoint.address, endpoint.qpn, endpoint.psn);
}
