//! Remote procedure calls over SEND and RECV. All clients of the server share one receive queue, so
//! that a thousand of them need no more buffers than one.
//!
//! In two terminals on one machine, without privileges:
//!
//! ```text
//! cargo run --release -p rocinante-examples --bin rpc -- serve --bind 127.0.0.1
//! cargo run --release -p rocinante-examples --bin rpc -- \
//!     call --bind 127.0.0.2 127.0.0.1 "which way is up?"
//! cargo run --release -p rocinante-examples --bin rpc -- \
//!     bench --bind 127.0.0.2 127.0.0.1 --iters 10000
//! ```
//!
//! The procedure turns its text into capitals. A buffer of the server is on its way round all the
//! time: it waits in the shared receive queue, brings a question, takes the answer back, and waits
//! again. Its number is that of the work request which holds it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, Sender, channel as channel_of_questions};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rocinante::cm::{self, Connection, Listener, Params, Request};
use rocinante::verbs::WcOpcode;
use rocinante::{
    Access, BufferPool, Context, Cq, Mr, PoolBuffer, PreparedQp, RecvWr, SendWr, Srq, VerbsError,
};
use rocinante_examples::{Args, PORT};

const USAGE: &str = "usage: rpc serve --bind ADDRESS [--device NAME] [--port P]
       rpc call  --bind ADDRESS [--device NAME] [--port P] SERVER TEXT
       rpc bench --bind ADDRESS [--device NAME] [--port P] [--iters N] [--size S] SERVER";

/// The longest question or answer, in bytes.
const LONGEST: usize = 4096;
/// Buffers of the server, for all clients together.
const BUFFERS: u32 = 256;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    let args = Args::read(USAGE);
    let words: Vec<&str> = args.words.iter().map(String::as_str).collect();
    let done = match (args.bind, words.as_slice()) {
        (Some(bind), ["serve"]) => serve(&args, bind),
        (Some(bind), ["call", server, text]) => call(&args, bind, server, text),
        (Some(bind), ["bench", server]) => bench(&args, bind, server),
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(2);
        }
    };
    if let Err(error) = done {
        eprintln!("rpc: {error}");
        std::process::exit(1);
    }
}

/// The way to the thread that answers a client, by the context of the client's queue pair. A client
/// may ask before its connection is there: its questions wait here.
type Clients = Mutex<HashMap<u64, Sender<Question>>>;

/// A question: its buffer, and its length in bytes.
type Question = (PoolBuffer, usize);

fn serve(args: &Args, bind: IpAddr) -> Result<(), VerbsError> {
    let ctx = args.open(bind)?;
    let address = SocketAddr::new(bind, args.port.unwrap_or(PORT));
    let pd = ctx.alloc_pd();
    let channel = ctx.create_comp_channel()?;
    // A buffer has one completion at a time.
    let cq = ctx.create_cq_with(BUFFERS, &channel)?;
    let srq = pd.create_srq(BUFFERS, 1)?;
    let pool = BufferPool::new(&pd, BUFFERS as usize, LONGEST, Access::LOCAL_WRITE)?;
    refill(&srq, &pool)?;
    let clients = Arc::new(Clients::default());
    let listener = Listener::bind(&ctx, address, 64)?;
    println!("serving on {address}, device {} ({})", ctx.name(), ctx.provider());

    std::thread::spawn({
        let (cq, srq, pool, clients) = (cq.clone(), srq.clone(), pool.clone(), clients.clone());
        move || loop {
            cq.req_notify(false).and_then(|()| hear(&cq, &srq, &pool, &clients)).expect("a queue");
            channel.wait_event(None).expect("events");
        }
    });
    for number in 1.. {
        let request = listener.request(None)?;
        let qp = pd.qp(&cq, &cq).srq(&srq).context(number).max_send_wr(BUFFERS).build()?;
        let (sender, questions) = channel_of_questions();
        clients.lock().unwrap().insert(number, sender);
        let (srq, pool, clients) = (srq.clone(), pool.clone(), clients.clone());
        std::thread::spawn(move || {
            println!("client {number}: {}", request.peer());
            let attended = attend(request, qp, &questions, &pool);
            clients.lock().unwrap().remove(&number);
            // Returns the buffers of its unanswered questions, so that other clients' questions
            // find receives.
            drop(questions);
            match attended.and(refill(&srq, &pool)) {
                Ok(()) => println!("client {number} has gone"),
                Err(why) => println!("client {number}: {why}"),
            }
        });
    }
    Ok(())
}

/// Posts every buffer that is free.
fn refill(srq: &Srq, pool: &BufferPool) -> Result<(), VerbsError> {
    while let Some(buffer) = pool.take() {
        let sge = buffer.slice().sge();
        srq.post_recv(&[RecvWr::new(buffer.give_away(), &[sge])])?;
    }
    Ok(())
}

/// Passes questions to the threads that answer. Buffers of answers that have left become free.
fn hear(cq: &Cq, srq: &Srq, pool: &BufferPool, clients: &Clients) -> Result<(), VerbsError> {
    while let Some(wc) = cq.poll_one()? {
        let buffer = pool.take_back(wc.wr_id).expect("a buffer that was given away");
        if wc.ok().is_ok()
            && wc.opcode == WcOpcode::Recv
            && let Some(client) = clients.lock().unwrap().get(&wc.context)
        {
            let _ = client.send((buffer, wc.byte_len as usize));
        }
    }
    refill(srq, pool)
}

/// Accepts a client and answers it until it goes.
fn attend(
    request: Request,
    qp: PreparedQp,
    questions: &Receiver<Question>,
    pool: &BufferPool,
) -> Result<(), VerbsError> {
    let connection = request.accept(qp, &Params::default())?.wait(PATIENCE)?;
    while !connection.is_disconnected() {
        let Ok((buffer, len)) = questions.recv_timeout(Duration::from_millis(100)) else {
            continue;
        };
        let text = buffer.slice().slice(0, len);
        text.write(&text.to_vec().to_ascii_uppercase());
        let (sge, number) = ([text.sge()], buffer.give_away());
        if let Err(error) = connection.post(SendWr::send(&sge).wr_id(number)) {
            drop(pool.take_back(number));
            return Err(error.into());
        }
    }
    Ok(())
}

/// A client's connection.
struct Client {
    connection: Connection,
    cq: Cq,
    question: Mr,
    answer: Mr,
}

impl Client {
    fn connect(ctx: &Context, server: SocketAddr) -> Result<Self, VerbsError> {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(4)?);
        let qp = pd.qp(&cq, &cq).build()?;
        Ok(Self {
            question: pd.allocate(LONGEST, Access::NONE)?,
            answer: pd.allocate(LONGEST, Access::LOCAL_WRITE)?,
            connection: cm::connect(qp, server, &Params::default(), PATIENCE)?,
            cq,
        })
    }

    fn call(&self, text: &[u8]) -> Result<Vec<u8>, VerbsError> {
        if text.len() > LONGEST {
            return Err(VerbsError::Invalid(format!("a question has {LONGEST} bytes at most")));
        }
        // First the place for the answer, then the question.
        self.connection.post_recv(&[RecvWr::new(0, &[self.answer.sge(0, LONGEST)])])?;
        self.question.write(0, text);
        self.connection.post(SendWr::send(&[self.question.sge(0, text.len())]))?;
        loop {
            let wc = self.cq.wait_one(PATIENCE)?.ok()?;
            if wc.opcode == WcOpcode::Recv {
                return Ok(self.answer.to_vec(0, wc.byte_len as usize));
            }
        }
    }
}

fn connect(args: &Args, bind: IpAddr, server: &str) -> Result<Client, VerbsError> {
    let server = server.parse().map_err(|_| VerbsError::Invalid("SERVER is no address".into()))?;
    Client::connect(&args.open(bind)?, SocketAddr::new(server, args.port.unwrap_or(PORT)))
}

fn call(args: &Args, bind: IpAddr, server: &str, text: &str) -> Result<(), VerbsError> {
    let client = connect(args, bind, server)?;
    println!("{}", String::from_utf8_lossy(&client.call(text.as_bytes())?));
    client.connection.disconnect()
}

fn bench(args: &Args, bind: IpAddr, server: &str) -> Result<(), VerbsError> {
    let client = connect(args, bind, server)?;
    let (calls, size) = (args.iters.unwrap_or(1000), args.size.unwrap_or(64).min(LONGEST));
    let (question, expected) = (vec![b'a'; size], vec![b'A'; size]);
    let start = Instant::now();
    for _ in 0..calls {
        assert_eq!(client.call(&question)?, expected, "the answer is another one's");
    }
    let each = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
    println!("{calls} calls of {size} bytes, {each:.1} µs each, all verified");
    client.connection.disconnect()
}
