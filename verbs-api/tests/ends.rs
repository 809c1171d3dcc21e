//! A program that ends right after its last completion leaves its peer no error: the packets that
//! the peer waits for have left before the program sees the completion.

mod sim;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rocinante::exchange::{Exchange, Hello};
use rocinante::verbs::{SendData, SendOp};
use rocinante::{
    Access, ConnectOptions, Context, Cq, Mr, Qp, RecvWr, VerbsError, Wc, WcStatus, cm,
};
use rocinante_netdev::sim::{SimNet, Verdict};
use rustix::process::{Signal, getpid, kill_process};
use sim::{PATIENCE, Side, connect, is_ready, request, send, sides};

/// Only the test drives: the receiver only until it has its completion.
#[test]
fn a_receive_completes_only_once_its_acknowledgement_has_left() {
    let write = |to: &Side| SendOp::Write {
        remote: to.mr.address(),
        rkey: to.mr.rkey(),
        imm: Some([7; 4]),
    };
    for messages in [1, 2, 3, 10] {
        for with_immediate in [false, true] {
            let net = SimNet::new();
            let sides = sides(&net, [false, false]);
            let [a, b] = &sides;
            let [qp, peer] = connect(&sides, 20);
            for wr_id in 0..messages {
                peer.post_recv(&[RecvWr { wr_id, sges: &[b.mr.sge(0, 64)] }]).unwrap();
            }
            let op = if with_immediate { write(b) } else { SendOp::Send { imm: None } };
            let data = SendData::Inline(&[7; 32]);
            let list: Vec<_> = (0..messages).map(|wr_id| request(wr_id, op, data)).collect();
            qp.post_send(&list).unwrap();
            for wr_id in 0..messages {
                let received = b.cq.poll_one().unwrap().expect("it has come");
                assert_eq!((received.wr_id, received.status), (wr_id, WcStatus::Success));
            }
            // From here on the receiver is not called again.
            for wr_id in 0..messages {
                let sent = a.cq.poll_one().unwrap();
                let sent = sent.unwrap_or_else(|| panic!("no answer to {wr_id} of {messages}"));
                assert_eq!((sent.wr_id, sent.status), (wr_id, WcStatus::Success));
            }
        }
    }
}

/// A program that answers a message has its acknowledgement leave with the answer, once it did so
/// before. A message without an answer is acknowledged with the program's next call.
#[test]
fn who_answers_acknowledges_with_the_answer() {
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let [qp, peer] = connect(&sides, 20);
    let (sent, answers) = std::sync::mpsc::channel();
    net.set_tap(Some(Box::new(move |datagram| {
        if datagram.src == sim::ADDRESSES[1] {
            let _ = sent.send(());
        }
        Verdict::Pass
    })));
    let receive = |of: &Qp, by: &Side, round| {
        of.post_recv(&[RecvWr { wr_id: 2 * round, sges: &[by.mr.sge(0, 64)] }]).unwrap();
    };
    // Without a look at the port for each: that is a call of the program's, too.
    let shown = |by: &Side, ids: Vec<u64>| {
        let mut room = [Wc::default(); 4];
        let completed = by.cq.poll(&mut room).unwrap();
        let succeeded = |wc: &Wc| (wc.status == WcStatus::Success).then_some(wc.wr_id);
        let mut completed: Vec<_> = completed.iter().filter_map(succeeded).collect();
        completed.sort_unstable();
        assert_eq!(completed, ids);
    };
    for round in 0..20 {
        receive(&qp, a, round);
        receive(&peer, b, round);
        qp.post_send(&[send(2 * round + 1, &[7; 32])]).unwrap();
        shown(b, if round == 0 { vec![0] } else { vec![2 * round - 1, 2 * round] });
        assert_eq!(answers.try_iter().count(), usize::from(round == 0), "round {round}");
        peer.post_send(&[send(2 * round + 1, &[8; 32])]).unwrap();
        assert_eq!(answers.try_iter().count(), 1 + usize::from(round > 0), "round {round}");
        shown(a, vec![2 * round, 2 * round + 1]);
    }
    a.ctx.progress();
    shown(b, vec![39]);
    b.ctx.progress();
    // It answers none of these: only the first waits.
    for (wr_id, early) in [(100, 0), (101, 1), (102, 1)] {
        peer.post_recv(&[RecvWr { wr_id, sges: &[b.mr.sge(0, 64)] }]).unwrap();
        qp.post_send(&[send(wr_id, &[7; 32])]).unwrap();
        b.cq.poll_one().unwrap().expect("it has come");
        assert_eq!(answers.try_iter().count(), early, "{wr_id}");
        b.ctx.progress();
        answers.try_iter().for_each(drop);
        shown(a, vec![wr_id]);
    }
    net.set_tap(None);
}

/// Both ends of a connection, the asking side's first. Only their program drives the devices.
fn connected_by_cm([a, b]: &[Side; 2]) -> [cm::Connection; 2] {
    let listener = cm::Listener::bind(&b.ctx, (sim::ADDRESSES[1], 7471).into(), 4).unwrap();
    let build = |side: &Side| side.qp();
    let mut asked =
        cm::Connecting::start(build(a), listener.address(), &cm::Params::default()).unwrap();
    b.ctx.progress();
    let request = listener.try_request().unwrap().expect("it has come");
    let mut accepted = request.accept(build(b), &cm::Params::default()).unwrap();
    a.ctx.progress();
    let asked = asked.try_finish().unwrap().expect("accepted");
    b.ctx.progress();
    let accepted = accepted.try_finish().unwrap().expect("established");
    [asked, accepted]
}

/// The answer to a disconnection leaves before its event can be taken.
#[test]
fn who_hears_of_the_end_of_a_connection_has_answered() {
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let [asked, accepted] = connected_by_cm(&sides);
    asked.disconnect().unwrap();
    b.ctx.progress();
    assert!(accepted.is_disconnected());
    // From here on the accepting side is not called again.
    a.ctx.progress();
    assert!(asked.is_disconnected());
    let counters = a.ctx.cm_counters().unwrap();
    assert_eq!(counters.repeated, 0, "{counters:?}");
}

/// When the receiver sends an answer, its program has not yet seen the message that it answers:
/// another thread of it could end the program at any moment.
#[test]
fn an_answer_leaves_before_any_thread_can_see_what_it_answers() {
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [_, b] = &sides;
    let [asked, accepted] = connected_by_cm(&sides);
    let [qp, peer] = connect(&sides, 20);
    let (bell, cq) = (accepted.notifier().unwrap(), b.cq.clone());
    let (answers, count) = std::sync::mpsc::channel();
    net.set_tap(Some(Box::new(move |datagram| {
        if datagram.src == sim::ADDRESSES[1] {
            // The device is locked, so this looks and does not drive.
            let completed = cq.poll_one().unwrap().is_some();
            answers.send((is_ready(&bell), completed)).unwrap();
        }
        Verdict::Pass
    })));
    peer.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(0, 64)] }]).unwrap();
    qp.post_send(&[send(2, &[7; 32])]).unwrap();
    b.ctx.progress();
    assert_eq!(count.try_iter().collect::<Vec<_>>(), [(false, false)], "its acknowledgement");
    b.succeed(1);
    asked.disconnect().unwrap();
    b.ctx.progress();
    assert_eq!(count.try_iter().collect::<Vec<_>>(), [(false, false)], "its answer to the end");
    assert!(accepted.is_disconnected());
    net.set_tap(None);
}

/// A program that polls memory sees no completions: its owed acknowledgements leave when its queue
/// pair goes.
#[test]
fn who_drops_a_queue_pair_has_acknowledged_all_that_came() {
    for count in [1, 2] {
        let sides = sides(&SimNet::new(), [false, false]);
        let [a, b] = &sides;
        let [qp, peer] = connect(&sides, 20);
        let op = SendOp::Write { remote: b.mr.address(), rkey: b.mr.rkey(), imm: None };
        let data = SendData::Inline(&[7; 8]);
        let list: Vec<_> = (0..count).map(|wr_id| request(wr_id, op, data)).collect();
        qp.post_send(&list).unwrap();
        b.ctx.progress();
        assert_eq!(b.mr.load_byte(7), 7);
        drop(peer);
        (0..count).for_each(|wr_id| a.succeed(wr_id));
    }
}

/// Says how a process that a test has started is to end.
const ROLE: &str = "ROCINANTE_TEST_ENDS";
/// Number of programs that end; a thousand by hand.
const ROUNDS: &str = "ROCINANTE_TEST_ROUNDS";

/// The last action of a program.
const LAST: [&str; 5] = ["receives", "is woken", "sends", "answers", "converses"];

/// Programs over the kernel's network that kill themselves, in the place of `_exit(2)`: nothing of
/// theirs runs after it. One that is about to answer, as it did before, exits: without dropping
/// anything.
#[test]
fn a_program_that_ends_right_after_its_last_completion_leaves_its_peer_no_error() {
    if let Ok(role) = std::env::var(ROLE) {
        let (last, address) = role.split_once('|').unwrap();
        end_after(last, address).unwrap();
    }
    let rounds = std::env::var(ROUNDS).map_or(12, |rounds| rounds.parse().unwrap());
    let (here, there) = rocinante::doc::addresses();
    let ctx = Context::open(here).unwrap();
    let begin = Instant::now();
    let listener = std::net::TcpListener::bind((here, 0)).unwrap();
    for round in 0..rounds {
        let last = LAST[round % LAST.len()];
        let this = std::thread::current();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", this.name().unwrap(), "--nocapture"])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let address = format!("{last}|{there},{}", listener.local_addr().unwrap());
        let mut child = command.env(ROLE, address).spawn().unwrap();
        let outlived = outlive(&ctx, &listener, last);
        if last != "converses" || outlived.is_err() {
            child.kill().unwrap();
        }
        let status = child.wait().unwrap();
        outlived.unwrap_or_else(|error| panic!("round {round}, it {last}: {error}; {status}"));
        assert_eq!(status.code(), (last == "converses").then_some(EXITED));
    }
    println!("{rounds} programs ended in {:?}", begin.elapsed());
}

/// The exit status of a program that is not killed.
const EXITED: i32 = 7;
/// Messages of a conversation, each way.
const CONVERSATION: usize = 5;

/// A queue pair of either side, connected.
struct End {
    qp: Qp,
    cq: Cq,
    mr: Mr,
}

impl End {
    fn new(ctx: &Context, cq: Cq, exchange: &mut Exchange) -> Result<Self, VerbsError> {
        let pd = ctx.alloc_pd();
        let mr = pd.allocate(64, Access::LOCAL_WRITE)?;
        let qp = pd.qp(&cq, &cq).access(Access::ALL).build()?;
        let peer = exchange.swap(&Hello { endpoints: vec![qp.endpoint()], ..Hello::default() })?;
        let qp = qp.connect(&peer.endpoints[0], &ConnectOptions::default());
        let end = Self { qp: qp?, cq, mr };
        end.receive()?;
        exchange.barrier("connected")?;
        Ok(end)
    }

    fn receive(&self) -> Result<(), VerbsError> {
        Ok(self.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[self.mr.sge(0, 64)] }])?)
    }

    fn send(&self) -> Result<(), VerbsError> {
        let data = SendData::Inline(&[7; 32]);
        let send = SendOp::Send { imm: None };
        Ok(self.qp.post_send(&[request(2, send, data)])?)
    }

    /// Waits for these completions, in whichever order.
    fn complete(&self, ids: &[u64]) -> Result<(), VerbsError> {
        for _ in ids {
            let wc = self.cq.wait_one(PATIENCE)?;
            if wc.status != WcStatus::Success || !ids.contains(&wc.wr_id) {
                let what = format!("of {ids:?}, {} completes with {}", wc.wr_id, wc.status);
                return Err(VerbsError::Invalid(what));
            }
        }
        Ok(())
    }
}

/// The peer of a program that ends.
fn outlive(ctx: &Context, listener: &std::net::TcpListener, last: &str) -> Result<(), VerbsError> {
    let mut exchange = Exchange::accept_from(listener)?;
    let end = End::new(ctx, ctx.create_cq(4)?, &mut exchange)?;
    match last {
        "sends" => end.complete(&[1])?,
        "answers" => {
            end.send()?;
            end.complete(&[1, 2])?;
        }
        "converses" => {
            end.complete(&[1])?;
            for _ in 1..CONVERSATION {
                end.receive()?;
                end.send()?;
                end.complete(&[1, 2])?;
            }
            end.send()?;
            end.complete(&[2])?;
        }
        _ => {
            end.send()?;
            end.complete(&[2])?;
        }
    }
    assert_eq!(end.mr.len(), 64);
    Ok(())
}

/// A program that ends.
fn end_after(last: &str, addresses: &str) -> Result<(), VerbsError> {
    let (own, peer) = addresses.split_once(',').unwrap();
    let ctx = Context::open(own.parse().unwrap())?;
    // It ends with each of its devices.
    let _other = Context::open(rocinante::doc::addresses().0)?;
    let mut exchange = Exchange::connect(peer.parse().unwrap(), Duration::from_secs(10))?;
    let channel = ctx.create_comp_channel()?;
    let cq = ctx.create_cq_with(4, &channel)?;
    cq.req_notify(false)?;
    let end = End::new(&ctx, cq, &mut exchange)?;
    match last {
        "receives" => end.complete(&[1])?,
        "is woken" => {
            channel.wait_event(Some(PATIENCE))?;
            end.complete(&[1])?;
        }
        "sends" => {
            end.send()?;
            end.complete(&[2])?;
        }
        "converses" => {
            for round in 1..=CONVERSATION {
                end.send()?;
                end.complete(&[1, 2])?;
                if round < CONVERSATION {
                    end.receive()?;
                }
            }
            std::process::exit(EXITED);
        }
        _ => {
            end.complete(&[1])?;
            end.send()?;
            end.complete(&[2])?;
        }
    }
    kill_process(getpid(), Signal::KILL).unwrap();
    unreachable!("killed")
}
