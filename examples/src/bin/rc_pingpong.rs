//! A message goes back and forth over a reliable connection: the smallest complete program.
//!
//! In two terminals on one machine, without privileges:
//!
//! ```text
//! cargo run --release -p rocinante-examples --bin rc_pingpong -- --bind 127.0.0.1
//! cargo run --release -p rocinante-examples --bin rc_pingpong -- --bind 127.0.0.2 127.0.0.1
//! ```

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use rocinante::cm::{self, Connection, Listener, Params};
use rocinante::{Access, Cq, Mr, RecvWr, SendWr, Turns, VerbsError};
use rocinante_examples::{Args, PORT};

const USAGE: &str = "usage: rc_pingpong --bind ADDRESS [--device NAME] [--port P] [--iters N] [--size BYTES] [SERVER]

The server is started without SERVER; the client with the server's address. Give both the same --iters and --size.";

const PATIENCE: Duration = Duration::from_secs(10);

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
    let port = args.port.unwrap_or(PORT);

    // The device of the interface with this address, or one of the kernel's (--device rxe0).
    let ctx = args.open(bind)?;
    println!("device {} ({})", ctx.name(), ctx.provider());
    let pd = ctx.alloc_pd();
    // An incoming message is written into memory; the peer addresses none of it by itself.
    let outgoing = pd.allocate(size, Access::NONE)?;
    let incoming = pd.allocate(size, Access::LOCAL_WRITE)?;
    // A queue for each kind of completion, so that the program can wait for each.
    let (sent, received) = (ctx.create_cq(4)?, ctx.create_cq(4)?);
    let qp = pd.qp(&sent, &received).build()?;
    // Before the peer can send: a message without a receive waits, or fails.
    qp.post_recv(&[RecvWr::new(0, &[incoming.sge(0, size)])])?;

    let server = args.words.first();
    let connection = if let Some(server) = server {
        let server = server.parse().map_err(|_| invalid(format!("{server:?} is no address")))?;
        cm::connect(qp, SocketAddr::new(server, port), &Params::default(), PATIENCE)?
    } else {
        let listener = Listener::bind(&ctx, SocketAddr::new(bind, port), 1)?;
        println!("waiting on port {port}");
        listener.request(None)?.accept(qp, &Params::default())?.wait(PATIENCE)?
    };
    println!("connected with {}", connection.peer());

    let player = Player { connection, sent, received, outgoing, incoming, size };
    let (start, before) = (Instant::now(), Turns::of_thread());
    for number in 0..iters {
        if server.is_some() {
            player.send(number)?;
            player.receive(number)?;
        } else {
            player.receive(number)?;
            player.send(number)?;
        }
    }
    let us = start.elapsed().as_secs_f64() * 1e6 / iters as f64;
    println!("{iters} messages of {size} bytes there and back, all verified: {us:.2} µs each");
    // Where threads of other programs have the processors, the time is theirs.
    if let (Some(before), Some(now)) = (before, Turns::of_thread()) {
        let waited = now.since(before).waited;
        if waited > start.elapsed() / 10 {
            println!("of this, other programs had the processors for {waited:.1?}: stop them");
        }
    }
    // The client leaves once it has everything; the server, once the client has left.
    if server.is_some() {
        player.connection.disconnect()?;
    }
    player.connection.wait_disconnected(PATIENCE)
}

struct Player {
    connection: Connection,
    sent: Cq,
    received: Cq,
    outgoing: Mr,
    incoming: Mr,
    size: usize,
}

impl Player {
    /// Sends message `number` and waits until the peer has received it.
    fn send(&self, number: u64) -> Result<(), VerbsError> {
        self.outgoing.write(0, &vec![letter(number); self.size]);
        self.connection.post(SendWr::send(&[self.outgoing.sge(0, self.size)]).wr_id(number))?;
        self.sent.wait_one(PATIENCE)?.ok()?;
        Ok(())
    }

    /// Waits for message `number`, verifies it and prepares for the next one.
    fn receive(&self, number: u64) -> Result<(), VerbsError> {
        self.received.wait_one(PATIENCE)?.ok()?;
        if self.incoming.to_vec(0, self.size).iter().any(|byte| *byte != letter(number)) {
            return Err(invalid(format!("message {number} differs from the one sent")));
        }
        self.connection.post_recv(&[RecvWr::new(0, &[self.incoming.sge(0, self.size)])])?;
        Ok(())
    }
}

fn letter(number: u64) -> u8 {
    b'a' + (number % 26) as u8
}

fn invalid(why: String) -> VerbsError {
    VerbsError::Invalid(why)
}
