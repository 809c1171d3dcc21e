//! Checks of features that only hardware has, run inside the guest; and all tests of the API, by
//! name.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{Gid, Uid, setgid, setuid};
use rocinante::device::{Backend, Provider};
use rocinante::verbs::{Mtu, SendData, SendOp};
use rocinante::{Access, ConnectOptions, Context, OpenOptions, SendWr, VerbsError, WcStatus, cm};
use rocinante_tests::harness::{KernelDevice, On};
use rocinante_tests::verbs;

use crate::agent::machine::Kind;
use crate::matrix::{Step, cannot};

/// A named check.
pub struct Check {
    /// Its name.
    pub name: &'static str,
    run: fn(&Context) -> Step,
}

/// All of them.
pub static CHECKS: [Check; 2] =
    [Check { name: "device", run: device }, Check { name: "counters", run: counters }];

/// Runs the check or the test of the API with this name on a device. Error: the first deviation
/// from the expected result.
pub fn run(name: &str, device: &str, address: IpAddr) -> Step {
    if let Some(test) = verbs::find(name) {
        return test.run(On::Kernel(KernelDevice { name: device.to_owned(), address }));
    }
    let check = CHECKS.iter().find(|check| check.name == name);
    let check = check.ok_or_else(|| format!("there is no check {name:?}"))?;
    let ctx = OpenOptions::new().device(device).open(address).map_err(text)?;
    (check.run)(&ctx)
}

/// Runs all checks and tests and prints the results. Error: the number of failures.
pub fn run_all(device: &str, address: IpAddr) -> Step {
    let checks = CHECKS.iter().map(|check| check.name);
    let names: Vec<&str> = checks.chain(verbs::TESTS.iter().map(|test| test.name)).collect();
    let mut failed = 0;
    for name in &names {
        match run(name, device, address) {
            Ok(()) => println!("{name:<70}ok"),
            Err(why) => {
                println!("{name:<70}FAILED: {why}");
                failed += 1;
            }
        }
    }
    ensure(failed == 0, || format!("{failed} of {} checks failed", names.len()))
}

/// Prints that it listens, and then a device's asynchronous events, one line each, until there was
/// none for `seconds`. Error: the error of the device or of the kernel.
pub fn watch(device: &str, address: IpAddr, seconds: u16) -> Step {
    let ctx = OpenOptions::new().device(device).open(address).map_err(text)?;
    println!("listening to {device}");
    let timeout = PollTimeout::try_from(Duration::from_secs(seconds.into()))
        .map_err(|error| error.to_string())?;
    while poll(&mut [PollFd::new(ctx.async_fd(), PollFlags::POLLIN)], timeout)
        .map_err(|error| error.to_string())?
        > 0
    {
        let event = ctx.poll_async_event().ok_or("readable, but no event")?;
        println!("{event:?}");
    }
    Ok(())
}

/// Listens for connections, makes one with itself, prints that, and waits until the device is gone.
/// Error: the listener or a connection is not notified, or the listener is notified only once.
pub fn gone(device: &str, address: IpAddr) -> Step {
    const PATIENCE: Duration = Duration::from_secs(30);
    let ctx = OpenOptions::new().device(device).open(address).map_err(text)?;
    let here = SocketAddr::new(address, 7471);
    let listener = cm::Listener::bind(&ctx, here, 1).map_err(text)?;
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).map_err(text)?);
    let qp = || pd.qp(&cq, &cq).access(Access::ALL).build().map_err(text);
    let params = cm::Params::default();
    let asks = cm::Connecting::start(qp()?, here, &params).map_err(text)?;
    let request = listener.request(Some(PATIENCE)).map_err(text)?;
    let accepts = request.accept(qp()?, &params).map_err(text)?;
    let both = [asks, accepts].map(|connecting| connecting.wait(PATIENCE).map_err(text));
    println!("listening on {device}");
    for connection in both {
        connection?.wait_disconnected(PATIENCE).map_err(text)?;
    }
    for _ in 0..2 {
        let why = listener.request(Some(PATIENCE)).err().ok_or("a request arrived")?;
        ensure(why.errno() == nix::Error::ENODEV as i32, || text(why))?;
    }
    println!("{device} is gone");
    Ok(())
}

/// Opens a device as the user with this number, registers `bytes` bytes, and listens for
/// connections if `listen` is set. Error: the error of the device or of the kernel.
pub fn open(device: &str, address: IpAddr, bytes: usize, user: u32, listen: bool) -> Step {
    if user != 0 {
        setgid(Gid::from_raw(user)).map_err(|error| error.to_string())?;
        setuid(Uid::from_raw(user)).map_err(|error| error.to_string())?;
    }
    let ctx = OpenOptions::new().device(device).open(address).map_err(text)?;
    let _region = ctx.alloc_pd().allocate(bytes, Access::LOCAL_WRITE).map_err(text)?;
    if listen {
        cm::Listener::bind(&ctx, SocketAddr::new(address, 7471), 1).map_err(text)?;
    }
    Ok(())
}

fn device(ctx: &Context) -> Step {
    let name = ctx.name().to_owned();
    let address = ctx.gids()[0];
    let soft_roce = Kind::of(&name) == Kind::SoftRoce;
    ensure(ctx.provider() == Provider::Hardware && ctx.backend().is_none(), || "provider".into())?;
    ensure(ctx.gids().len() == 1, || format!("one address: {:?}", ctx.gids()))?;
    let attr = ctx.query_device();
    let hardware = attr.hardware.clone().ok_or("no attributes of hardware")?;
    let sane = attr.limits.max_qp > 0 && attr.active_mtu <= hardware.max_mtu && attr.port.is_none();
    // The guest's link is large enough for all path MTUs.
    let sane = sane && (!soft_roce || attr.active_mtu == Mtu::Mtu4096);
    ensure(sane && hardware.port >= 1 && hardware.gid_indices.len() == 1, || format!("{attr:?}"))?;
    // Opened by name, by port, and by address alone.
    let all = Context::open_device(&name).map_err(text)?;
    let several = !soft_roce || (all.gids().len() >= 2 && all.gids()[0] == address);
    ensure(several && !all.gids().is_empty(), || format!("{:?}", all.gids()))?;
    let number = hardware.port;
    let port = Context::open_device(&format!("{name}:{number}")).map_err(text)?;
    ensure(port.name() == name, || "the port's device".into())?;
    let any = OpenOptions::new().device("hw").open(address).map_err(text)?;
    ensure(any.name() == name && any.gids() == [address], || "whichever has it".into())?;
    let error = Context::open_device(&format!("{name}:99")).err().ok_or("there is a port 99")?;
    let shown = format!("port {number} is Ethernet, ACTIVE");
    ensure(error.to_string().contains(&shown), || error.to_string())?;
    let error = OpenOptions::new().device(&name).netdev(Backend::Udp).open(address);
    let error = error.err().ok_or("a backend for hardware")?;
    ensure(matches!(error, VerbsError::Invalid(_)), || error.to_string())
}

fn counters(ctx: &Context) -> Step {
    let before = ctx.counters();
    let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).map_err(text)?);
    let mr = pd.allocate(16 << 10, Access::ALL).map_err(text)?;
    let qp = pd.qp(&cq, &cq).access(Access::ALL).build().map_err(text)?;
    let end = qp.endpoint();
    // The queue pair is its own peer.
    let qp = qp.connect(&end, &ConnectOptions::default()).map_err(|refused| text(refused.error))?;
    let op = SendOp::Write { remote: mr.address() + 8192, rkey: mr.rkey(), imm: None };
    let (sge, signaled) = ([mr.sge(0, 8192)], true);
    let wr = SendWr::new(op, SendData::Sges(&sge)).wr_id(1).signaled(signaled);
    qp.post_send(&[wr]).map_err(|error| error.to_string())?;
    let wc = cq.wait_one(Duration::from_secs(10)).map_err(text)?;
    ensure(wc.status == WcStatus::Success, || format!("{wc:?}"))?;
    // The kernel refreshes a device's counters only after a while: 10 ms by default ("lifespan").
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let after = ctx.counters();
        // Two packets there, and one acknowledgement back.
        let sent = after.transport.sent_pkts - before.transport.sent_pkts;
        let received = after.transport.rcvd_pkts - before.transport.rcvd_pkts;
        if sent >= 3 && received >= 3 {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let found = format!("{sent} sent, {received} received");
            // Hardware may count only packets at its port, and not looped ones. Drivers also name
            // counters differently.
            return Err(match Kind::of(ctx.name()) {
                Kind::Device => {
                    cannot(format!("the device's packets to itself are not counted: {found}"))
                }
                Kind::SoftRoce | Kind::Rocinante => found,
            });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Step {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// For `map_err`.
#[allow(clippy::needless_pass_by_value)]
fn text(error: VerbsError) -> String {
    error.to_string()
}
