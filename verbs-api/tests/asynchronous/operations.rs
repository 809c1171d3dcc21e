//! Operations that own their memory until they are done.

use super::*;

#[test]
fn operations_return_their_memory() {
    under_tokio(|| async {
        let ([a, b], qp, peer) = owning(true);
        let remote = region(&b.mr);
        let mut buffer = a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        let (written, read);
        buffer.write(0, b"forty-two");
        (written, buffer) = qp.write(buffer, remote).await;
        assert_eq!(written.unwrap().opcode, WcOpcode::RdmaWrite);
        assert_eq!(b.mr.to_vec(0, 9), b"forty-two");
        b.mr.write(0, b"forty-one");
        (read, buffer) = qp.read(buffer, remote).await;
        assert_eq!((read.unwrap().byte_len, &buffer.to_vec(0, 9)[..]), (64, &b"forty-one"[..]));
        // An atomic needs eight bytes.
        b.mr.word(0).store(40, Ordering::SeqCst);
        let add = SendOp::FetchAdd { remote: remote.address, rkey: remote.rkey, add: 2 };
        let (added, part) = qp.operation(add, Part::new(buffer, 8, 8)).await;
        added.unwrap();
        buffer = part.into_inner();
        assert_eq!(buffer.word(8).load(Ordering::SeqCst), 40);
        assert_eq!(b.mr.word(0).load(Ordering::SeqCst), 42);
        // Messages arrive in order, and their futures may be waited for in any.
        let receiving =
            [(); 3].map(|()| peer.recv(b.pd.allocate(64, Access::LOCAL_WRITE).unwrap()));
        for len in [1, 2, 3] {
            let (sent, part) = qp.send(Part::new(buffer, 0, len)).await;
            sent.unwrap();
            buffer = part.into_inner();
        }
        let mut lens = Vec::new();
        for received in receiving.into_iter().rev() {
            lens.push(received.await.0.unwrap().byte_len);
        }
        assert_eq!(lens, [3, 2, 1]);
    });
}

/// Many tasks, each with operations of its own on one queue pair.
#[test]
fn operations_of_many_tasks_complete() {
    under_tokio(|| async {
        let ([a, b], qp, _peer) = owning(true);
        let (qp, remote) = (Arc::new(qp), region(&b.mr));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (qp, mut buffer) = (qp.clone(), a.pd.allocate(64, Access::LOCAL_WRITE).unwrap());
            tasks.spawn(async move {
                for _ in 0..100 {
                    let read;
                    (read, buffer) = qp.read(buffer, remote).await;
                    read.unwrap();
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
    });
}

/// Each would take the completions of the other.
#[test]
fn no_two_queue_pairs_whose_operations_own_their_memory_share_a_queue() {
    let [a, _b] = driven();
    let cqs = [(); 2].map(|()| a.ctx.create_cq(16).unwrap());
    let make = |send: &Cq, recv: &Cq| AsyncQp::new(a.pd.qp(send, recv).build().unwrap());
    let first = make(&cqs[0], &cqs[0]).unwrap();
    for (send, recv) in [(0, 0), (0, 1), (1, 0)] {
        assert!(matches!(make(&cqs[send], &cqs[recv]), Err(VerbsError::Invalid(_))));
    }
    // A refused builder has no queue.
    drop(make(&cqs[1], &cqs[1]).unwrap());
    drop(first);
    make(&cqs[0], &cqs[1]).unwrap();
}

/// A program may post requests of its own, which have any numbers.
#[test]
fn requests_of_the_program_complete_no_operation() {
    under_tokio(|| async {
        let ([a, b], qp, peer) = owning(true);
        let buffer = || a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        let mut receiving = qp.recv(buffer());
        for wr_id in 0..4 {
            qp.post(SendWr::write(&[a.mr.sge(0, 64)], region(&b.mr)).wr_id(wr_id)).unwrap();
        }
        qp.write(buffer(), region(&b.mr)).await.0.unwrap();
        assert!(poll_once(&mut receiving).is_none());
        peer.send(b.pd.allocate(8, Access::NONE).unwrap()).await.0.unwrap();
        assert_eq!(receiving.await.0.unwrap().byte_len, 8);
    });
}

/// A future that was polled and is not any more keeps no other waiting.
#[test]
fn an_operation_that_nobody_polls_keeps_no_other_waiting() {
    under_tokio(|| async {
        let ([a, b], qp, peer) = owning(true);
        let buffer = || a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        let mut idle = qp.recv(buffer());
        assert!(poll_once(&mut idle).is_none());
        for _ in 0..50 {
            let write = qp.write(buffer(), region(&b.mr));
            let mut other = qp.read(buffer(), region(&b.mr));
            assert!(poll_once(&mut other).is_none_or(|(read, _)| read.is_ok()));
            tokio::spawn(write).await.unwrap().0.unwrap();
        }
        peer.send(b.pd.allocate(8, Access::NONE).unwrap()).await.0.unwrap();
        assert_eq!(idle.await.0.unwrap().byte_len, 8);
    });
}

/// The memory of an operation whose future is dropped is freed when the operation is complete, and
/// not before. That needs no poll.
#[test]
fn memory_in_flight_outlives_its_future() {
    for polled in [false, true] {
        let ([a, b], qp, _peer) = owning(false);
        let (buffer, freed) = Watched::new(&a);
        let is_freed = || freed.load(Ordering::SeqCst);
        b.mr.write(0, &[7; 64]);
        let mut read = qp.read(buffer, region(&b.mr));
        if polled {
            assert!(poll_once(&mut read).is_none());
        }
        drop(read);
        std::thread::sleep(Duration::from_millis(5));
        assert!(!is_freed(), "the peer has not answered yet");
        until("the memory is freed", || {
            b.ctx.progress();
            is_freed()
        });
        // A future that is dropped when its operation is complete frees it at once.
        let (buffer, freed) = Watched::new(&a);
        let write = qp.write(buffer, region(&b.mr));
        b.ctx.progress();
        b.ctx.progress();
        std::thread::sleep(Duration::from_millis(5));
        drop(write);
        until("this, too", || {
            b.ctx.progress();
            freed.load(Ordering::SeqCst)
        });
    }
}

#[test]
fn operations_end_with_their_queue_pair() {
    under_tokio(|| async {
        let ([a, b], qp, _peer) = owning(false);
        let waiting = tokio::spawn(qp.recv(a.pd.allocate(64, Access::LOCAL_WRITE).unwrap()));
        let (buffer, freed) = Watched::new(&a);
        drop(qp.read(buffer, region(&b.mr)));
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(!waiting.is_finished() && !freed.load(Ordering::SeqCst));
        drop(qp);
        assert!(freed.load(Ordering::SeqCst));
        let (received, buffer) = waiting.await.unwrap();
        assert_eq!((status(received), buffer.len()), (WcStatus::WrFlushErr, 64));
    });
}

/// Of two operations one was complete before the queue pair went, and not looked at yet.
#[test]
fn an_operation_that_is_complete_is_so_without_its_queue_pair() {
    under_tokio(|| async {
        let ([a, b], qp, _peer) = owning(true);
        let buffer = || a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        let (write, read) = (qp.write(buffer(), region(&b.mr)), qp.read(buffer(), region(&b.mr)));
        // They complete in order.
        read.await.0.unwrap();
        let waiting = qp.recv(buffer());
        drop(qp);
        write.await.0.unwrap();
        assert_eq!(status(waiting.await.0), WcStatus::WrFlushErr);
    });
}

/// The peer refuses an access, and the requests posted behind it are flushed. Each returns its
/// memory.
#[test]
fn operations_that_fail_say_why_and_return_their_memory() {
    under_tokio(|| async {
        let ([a, b], qp, peer) = owning(true);
        let buffer = || a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        // Refused before they are posted.
        let (refused, memory) = qp.read(buffer(), RemoteSlice { len: 63, ..region(&b.mr) }).await;
        assert!(matches!(refused, Err(VerbsError::Invalid(_))) && memory.len() == 64);
        let receiving: Vec<_> = (0..9).map(|_| qp.recv(buffer())).collect();
        let mut results = Vec::new();
        for receive in receiving {
            results.push(within(5, receive).await.map(|(result, _)| result));
        }
        let last = results.pop().unwrap();
        assert!(matches!(last, Some(Err(VerbsError::Post(_)))), "{last:?}");
        assert!(results.iter().all(Option::is_none), "they wait");
        // The peer's region has another key.
        let foreign =
            RemoteSlice { rkey: rocinante::verbs::Key(b.mr.rkey().0 ^ 0x100), ..region(&b.mr) };
        let (read, behind) = (qp.read(buffer(), foreign), qp.write(buffer(), region(&b.mr)));
        let ((read, memory), (behind, other)) = tokio::join!(read, behind);
        assert_eq!(status(read), WcStatus::RemAccessErr);
        assert_eq!((status(behind), memory.len(), other.len()), (WcStatus::WrFlushErr, 64, 64));
        let (late, _) = qp.write(buffer(), region(&b.mr)).await;
        assert_eq!(status(late), WcStatus::WrFlushErr);
        drop(peer);
    });
}

/// How often a thread of a device has panicked.
fn panics() -> &'static AtomicUsize {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let is_ours =
                std::thread::current().name().is_some_and(|name| name.starts_with("roce-"));
            let wanted = info.payload().downcast_ref() == Some(&WANTED);
            PANICS.fetch_add(usize::from(is_ours && !wanted), Ordering::SeqCst);
            before(info);
        }));
    });
    &PANICS
}

/// The text of a panic that a test wants.
const WANTED: &str = "a test wants this";

/// A value that a buffer drops with itself.
type Rest = Arc<std::sync::Mutex<Option<Box<dyn std::any::Any + Send>>>>;

/// A region with other things of its program.
struct Loaded {
    mr: Mr,
    rest: Rest,
    gone: std::sync::mpsc::Sender<Option<String>>,
}

impl Buffer for Loaded {
    fn sge(&self) -> Sge {
        Buffer::sge(&self.mr)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        drop(self.rest.lock().unwrap().take());
        let _ = self.gone.send(std::thread::current().name().map(str::to_owned));
    }
}

/// The device's own thread completes the operation, and so drops all that there is of the device.
#[test]
fn the_last_of_a_device_may_go_on_its_own_thread() {
    let panics = panics();
    let (a_and_b, qp, _peer) = owning(false);
    let [a, b] = a_and_b;
    let (gone, is_gone) = std::sync::mpsc::channel();
    let rest = Rest::default();
    let mr = a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let operation = qp.write(Loaded { mr, rest: rest.clone(), gone }, region(&b.mr));
    *rest.lock().unwrap() = Some(Box::new((a, qp)));
    drop((operation, rest));
    let mut thread = None;
    until("the operation", || {
        b.ctx.progress();
        thread = is_gone.try_recv().ok();
        thread.is_some()
    });
    assert!(thread.unwrap().unwrap().starts_with("roce-"));
    assert_eq!(panics.load(Ordering::SeqCst), 0);
}

/// The last to go may be a buffer, whose operation completes on a thread of the device.
#[test]
fn all_may_go_in_any_order_while_operations_are_in_flight() {
    let panics = panics();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut state = 1u64;
    let mut draw = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for _ in 0..200 {
        let ([a, b], qp, peer) = owning(true);
        let remote = region(&b.mr);
        let qp = Arc::new(qp);
        let mut all: Vec<Box<dyn std::any::Any>> = Vec::new();
        for _ in 0..draw(4) {
            let mut operation = qp.write(a.pd.allocate(4096, Access::NONE).unwrap(), remote);
            let wait = Duration::from_micros(draw(60) as u64);
            let done = runtime.block_on(async {
                tokio::time::timeout(
                    wait,
                    poll_fn(|cx| std::pin::Pin::new(&mut operation).poll(cx)),
                )
                .await
            });
            if done.is_err() {
                all.push(Box::new(operation));
            }
        }
        let Side { ctx, pd, cq, mr } = a;
        all.extend([Box::new(ctx) as Box<dyn std::any::Any>, Box::new(pd), Box::new(cq)]);
        all.extend([Box::new(mr) as Box<dyn std::any::Any>, Box::new(qp), Box::new(peer)]);
        all.push(Box::new(b));
        while !all.is_empty() {
            drop(all.swap_remove(draw(all.len())));
        }
    }
    assert_eq!(panics.load(Ordering::SeqCst), 0);
}

/// A region whose drop panics.
struct Bad(Mr);

impl Buffer for Bad {
    fn sge(&self) -> Sge {
        Buffer::sge(&self.0)
    }
}

impl Drop for Bad {
    fn drop(&mut self) {
        std::panic::panic_any(WANTED);
    }
}

#[test]
fn a_buffer_that_panics_when_it_is_freed_stops_no_device() {
    under_tokio(|| async {
        let panics = panics();
        let ([a, b], qp, _peer) = owning(false);
        let allocate = || a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        let (theirs, written) = (region(&b.mr), Arc::new(AtomicBool::new(false)));
        let is_written = written.clone();
        let bad = [(); 2].map(|()| qp.write(Bad(allocate()), theirs));
        let good = qp.write(allocate(), theirs);
        // While they are in flight: this thread would free those that are complete.
        drop(bad);
        let driver = std::thread::spawn(move || {
            while !is_written.load(Ordering::SeqCst) {
                b.ctx.progress();
                std::thread::yield_now();
            }
            b
        });
        let (result, _) = good.await;
        written.store(true, Ordering::SeqCst);
        drop(driver.join().unwrap());
        result.unwrap();
        assert_eq!(panics.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn an_operation_that_fails_names_no_number() {
    under_tokio(|| async {
        let ([a, b], qp, _peer) = owning(true);
        let nowhere = RemoteSlice { rkey: rocinante::verbs::Key(0x1234), ..region(&b.mr) };
        let error =
            qp.write(a.pd.allocate(64, Access::NONE).unwrap(), nowhere).await.0.unwrap_err();
        let VerbsError::Completion(failed) = &error else { panic!("{error}") };
        assert_eq!((failed.status, failed.wr_id), (WcStatus::RemAccessErr, 0));
        let text = error.to_string();
        assert!(text.starts_with("RDMA_WRITE of queue pair "), "{text}");
    });
}
