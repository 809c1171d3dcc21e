//! The agent at work: connections, announcements of the kernel, signals. One thread waits for all
//! of it; long queries of the kernel run on a few others.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rocinante_netdev::for_agent::descriptors::{raise_limit, refuse_rights};
use rocinante_netdev::for_agent::rtnl::queues;
use rocinante_netdev::handed::{
    Answer, Code, Refused, Request, WAIT_MAX, capture, guard, page, receive_request, send_answer,
};
use rocinante_netdev::{Given, give};
use rustix::net::{RecvFlags, recv};
use sd_notify::NotifyState;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::asker::{Asker, Namespace, Own};
use crate::caller::Caller;
use crate::captures::Captures;
use crate::closers::{Closers, Foreign, INTERRUPT};
use crate::config::Config;
use crate::containers::{Containers, HeardOf, Hints, PortId, Totals};
use crate::control::serve::Clients;
use crate::control::{About, AgentStatus, Reply, Verb};
use crate::ends::Ends;
use crate::error::AgentError;
use crate::guard::Guards;
use crate::host::{Watch, link_counts};
use crate::http::Listening;
use crate::journal::{Journal, MINUTE};
use crate::limits::{Limits, Share, Turns, WORKED_MAX};
use crate::listener::{Kind, Listener, accept_all};
use crate::metrics::{ContainerFacts, Facts};
use crate::pages::Pages;
use crate::ready::readable;
use crate::state::StateFile;
use crate::{control, holders, http, log, rights, steps};

mod outlive;

use self::outlive::{SEARCHES_MAX, outlive};

/// The longest that a request waits for its turn, whatever it says.
const PATIENCE_MAX: Duration = Duration::from_secs(60);
/// How long a thread without work stays.
const WORKER_IDLE: Duration = Duration::from_millis(500);
/// The pause in which the kernel's announcements are collected, after some were acted on: this many
/// times the duration of the acts, up to a bound. A container's packets from a new address are
/// dropped meanwhile, and its kernel asks for a neighbour again after a second.
const HEAR_PAUSE_TIMES: u32 = 9;
const HEAR_PAUSE_MAX: Duration = Duration::from_millis(10);

/// How often to look whether programs hold more than they may.
const HOLDS_PAUSE: Duration = Duration::from_secs(2);

/// What all connections share.
#[derive(Debug)]
struct Agent {
    own: Own,
    ends: Ends,
    closers: Arc<Closers>,
    containers: Containers,
    journal: Arc<Journal>,
    limits: Arc<Limits>,
    /// For the processes that have a port's sockets, by the container's end on the host.
    searches: Turns<u32>,
    pages: Arc<Pages>,
    captures: Captures,
    /// The file that SIGHUP has read again.
    file: Option<PathBuf>,
    clients: Clients,
    since: Instant,
}

/// The sockets that programs connect to.
struct Listeners {
    ports: Listener,
    guards: Option<(Listener, Arc<Guards>)>,
    pages: Listener,
    captures: Listener,
    control: Listener,
}

/// Serves the containers of this network namespace until SIGTERM or SIGINT. `config` is the file
/// of the configuration; without it that has its defaults. Errors are logged, too. Error: the
/// configuration makes no sense, a right is missing, another agent runs with this state, or the
/// socket cannot be made.
pub fn run(config: Option<&Path>) -> Result<(), AgentError> {
    log::start();
    let read = config.map_or_else(|| Ok(Config::default()), Config::read);
    read.and_then(|it| start(&it, config)).inspect_err(|error| tracing::error!("{error}"))
}

fn start(config: &Config, file: Option<&Path>) -> Result<(), AgentError> {
    log::set_level(config.log);
    rights::check()?;
    // Ports and processes are held by them.
    raise_limit();
    let own = Own::new().map_err(|e| AgentError::os("/proc/self/ns", &e, "mount /proc"))?;
    let state = StateFile::open(&config.state, own.network().inode()).map_err(|e| {
        AgentError::os(config.state.display(), &e, "one agent at a time has a state")
    })?;
    // The kernel checks the rights of this moment for the announcements that the socket may
    // receive.
    let watch = Watch::open().map_err(|e| AgentError::os("cannot open rtnetlink", &e, ""))?;
    let listen = |path: &Path, kind| {
        let hint = "see socket and state in agent.toml";
        Listener::at(path, kind).map_err(|e| AgentError::os(path.display(), &e, hint))
    };
    let closers = Arc::<Closers>::default();
    let journal = Arc::<Journal>::default();
    let limits = Arc::new(Limits::new(config.requests_per_second));
    let guards = match config.guardian() {
        Ok(Some(program)) => {
            Some(Arc::new(Guards::new(program, limits.alike(), &closers, &journal)))
        }
        Ok(None) => None,
        Err(error) => {
            let guardian = config.guardian.display();
            tracing::warn!(%guardian, "no connections of the dead are ended: {error}");
            None
        }
    };
    let guard_path = guard::path(&config.socket);
    let guards = match guards {
        Some(guards) => Some((listen(&guard_path, Kind::PUBLIC)?, guards)),
        None => {
            // One that an earlier agent left goes.
            drop(listen(&guard_path, Kind::PUBLIC)?);
            None
        }
    };
    // Requests have no descriptors. An older kernel does not know the option.
    let no_rights = |socket: &_| refuse_rights(socket);
    let ports = listen(&config.socket, Kind { prepare: no_rights, ..Kind::PUBLIC })?;
    let control = Kind { prepare: no_rights, ..Kind::PRIVATE };
    let control = listen(&control::path(&config.state), control)?;
    let file = file.map(Path::to_owned);
    let pages = listen(&page::path(&config.socket), Kind { prepare: no_rights, ..Kind::PUBLIC })?;
    let captures = Kind { prepare: no_rights, ..Kind::PUBLIC };
    let captures = listen(&capture::path(&config.socket), captures)?;
    let listeners = Listeners { ports, guards, pages, captures, control };
    rights::drop_others()?;
    let no_netlink = |e| AgentError::os("cannot open rtnetlink", &e, "it needs Linux 4.20");
    let pages = Pages::new(&config.state, own.network().inode(), limits.alike())
        .map_err(|e| AgentError::os("/proc/sys/kernel/random/boot_id", &e, "mount /proc"))?;
    let pages = Arc::new(pages);
    let containers = Containers::new(config, state, &journal, (&limits, &pages));
    let containers = containers.map_err(no_netlink)?;
    let captures = Captures::new(limits.alike());
    let agent = Arc::new(Agent {
        own,
        ends: Ends::new().map_err(no_netlink)?,
        closers,
        containers,
        journal,
        limits,
        searches: Turns::new(SEARCHES_MAX),
        pages,
        captures,
        file,
        clients: Clients::default(),
        since: Instant::now(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // And one each for the kernel's announcements, the sums of the log, a command, the
        // configuration, a scrape and one of root's, the end of a page, and what programs hold.
        .max_blocking_threads(WORKED_MAX + SEARCHES_MAX + 8)
        .thread_keep_alive(WORKER_IDLE)
        .build()
        .map_err(|e| AgentError::os("cannot start", &e, ""))?;
    let ended = runtime.block_on(serve(agent, listeners, watch));
    // A task that hangs in the kernel is not waited for.
    runtime.shutdown_timeout(WAIT_MAX);
    ended
}

async fn serve(agent: Arc<Agent>, listeners: Listeners, watch: Watch) -> Result<(), AgentError> {
    let signal = |kind| signal(kind).map_err(|e| AgentError::os("cannot wait", &e, ""));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let hangup = signal(SignalKind::hangup())?;
    // A signal by which threads of the closers end a wait needs a handler, and no more.
    let _interrupts = signal(SignalKind::from_raw(INTERRUPT as i32))?;
    let Listeners { ports, guards, pages, captures, control } = listeners;
    // Changes made while no agent ran are read now; later changes are announced.
    let held = agent.containers.recover(&agent.own);
    let held = held.map_err(|e| AgentError::os("cannot look for containers", &e, ""))?;
    for port in held {
        tokio::spawn(outlive(Arc::clone(&agent), port));
    }
    let config = agent.containers.config();
    let of_root = control::stat_path(&config.state).to_string_lossy().into_owned();
    metrics(&agent, &of_root, 0o600).await;
    // Users that may enter the directory may ask.
    metrics(&agent, &config.metrics, 0o666).await;
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "serves");
    let hear = tokio::spawn(hear(Arc::clone(&agent), watch));
    let sums = tokio::spawn(sums(Arc::clone(&agent)));
    tokio::spawn(reloads(Arc::clone(&agent), hangup));
    let commanded = Arc::clone(&agent);
    tokio::spawn(async move {
        accept_all(control, &commanded.closers, |connection| {
            let (agent, worker) = (Arc::clone(&commanded), Arc::clone(&commanded));
            let work = move |request: &_, each: &mut dyn FnMut(Reply)| worker.obey(request, each);
            async move { agent.clients.serve(connection, agent.containers.news(), work).await }
        })
        .await;
    });
    if let Some((listener, guards)) = guards {
        let agent = Arc::clone(&agent);
        tokio::spawn(async move {
            accept_all(listener, &agent.closers, |connection| {
                let (agent, guards) = (Arc::clone(&agent), Arc::clone(&guards));
                async move { guards.watch(&agent.own, &agent.ends, connection).await }
            })
            .await;
        });
    }
    let paged = Arc::clone(&agent);
    tokio::spawn(async move {
        accept_all(pages, &paged.closers, |connection| {
            let agent = Arc::clone(&paged);
            async move { agent.pages.serve(&agent.own, &agent.ends, connection).await }
        })
        .await;
    });
    let captured = Arc::clone(&agent);
    tokio::spawn(async move {
        accept_all(captures, &captured.closers, |connection| {
            let agent = Arc::clone(&captured);
            async move {
                // As it is when the capture begins: a program may connect long before it asks.
                let most = || agent.containers.config().captures_max;
                let of = (&agent.own, &agent.ends);
                agent.captures.serve(of, &agent.journal, most, connection).await;
            }
        })
        .await;
    });
    let holds = tokio::spawn(holds(Arc::clone(&agent)));
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = accept_all(ports, &agent.closers, |connection| {
            answered(Arc::clone(&agent), connection)
        }) => {}
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    hear.abort();
    sums.abort();
    holds.abort();
    agent.sum();
    agent.pages.last();
    tracing::info!("ends");
    Ok(())
}

/// Writes the sums of suppressed lines to the log, each minute.
async fn sums(agent: Arc<Agent>) {
    loop {
        tokio::time::sleep(MINUTE).await;
        let agent = Arc::clone(&agent);
        let _ = tokio::task::spawn_blocking(move || agent.sum()).await;
    }
}

/// Looks whether programs hold more than they may, as long as they may.
async fn holds(agent: Arc<Agent>) {
    loop {
        while !agent.containers.may_exceed() {
            agent.pages.may_exceed.notified().await;
        }
        tokio::time::sleep(HOLDS_PAUSE).await;
        let agent = Arc::clone(&agent);
        let judge = move || agent.containers.judge(Instant::now());
        let _ = tokio::task::spawn_blocking(judge).await;
    }
}

/// Serves metrics from now on at a place, a socket of this mode if it is a path. Empty: nowhere.
async fn metrics(agent: &Arc<Agent>, place: &str, mode: u32) {
    if place.is_empty() {
        return;
    }
    let agent = Arc::clone(agent);
    match Listening::at(place, mode).await {
        Ok(listening) => {
            tokio::spawn(http::serve(listening, move |details| agent.facts(details)));
        }
        // Ports are more important.
        Err(error) => tracing::error!("no metrics are served at {place}: {error}"),
    }
}

/// Reads the configuration again at each SIGHUP (`Type=notify-reload` of systemd.service(5)).
async fn reloads(agent: Arc<Agent>, mut hangup: Signal) {
    while hangup.recv().await.is_some() {
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            let _ = sd_notify::notify(&[NotifyState::Reloading, now]);
        }
        let agent = Arc::clone(&agent);
        let _ = tokio::task::spawn_blocking(move || agent.reload()).await;
        let _ = sd_notify::notify(&[NotifyState::Ready]);
    }
}

/// Follows the kernel's announcements.
async fn hear(agent: Arc<Agent>, watch: Watch) -> io::Result<()> {
    let mut watch = readable(watch)?;
    loop {
        let mut heard = BTreeSet::new();
        let mut ready = watch.readable_mut().await?;
        let more = ready.get_inner_mut().read(|of| {
            heard.insert(HeardOf::from(of));
        });
        if !more {
            ready.clear_ready();
        }
        let (agent, begun) = (Arc::clone(&agent), Instant::now());
        // One after the other, so that the last word is the last to be acted on.
        let _ = tokio::task::spawn_blocking(move || agent.containers.hear(&heard)).await;
        // A container may change its addresses without end.
        let pause = begun.elapsed() * HEAR_PAUSE_TIMES;
        tokio::time::sleep(pause.min(HEAR_PAUSE_MAX)).await;
    }
}

/// Answers a connection, and keeps its ports for as long as a process has them.
async fn answered(agent: Arc<Agent>, connection: Foreign<OwnedFd>) {
    steps::reached("asked");
    let asker = Asker::of(&connection, &agent.own);
    steps::reached("identified");
    // Programs that get nothing share the limits of one container.
    let share = asker.as_ref().map_or(Share::Stranger, |it| agent.ends.share_of(it, &agent.own));
    let caller = Caller::new(&agent.journal, share, asker.as_ref().ok());
    let Ok(connection) = readable(connection.of(share)) else { return };
    let worked = worked(&agent, &connection, asker, &caller).await;
    let Some((asker, given, port)) = worked else { return };
    let is_answered = caller.answer(&connection, &given);
    steps::reached("answered");
    drop(given);
    let Some(port) = port else { return };
    if is_answered {
        let Ok(process) = readable(asker.into_pidfd()) else {
            return outlive(agent, port).await;
        };
        tokio::select! {
            // It says that it is done, or anything, which it should not.
            _ = ended(&connection) => {}
            _ = process.readable() => {}
        }
    }
    drop(connection);
    outlive(agent, port).await;
}

/// Works the request of a connection in its turn. `None` if there is nothing to hand over: the
/// program has got its refusal, or has hung up.
async fn worked(
    agent: &Arc<Agent>,
    connection: &AsyncFd<Foreign<OwnedFd>>,
    asker: Result<Asker, Refused>,
    caller: &Caller,
) -> Option<(Asker, Given, Option<PortId>)> {
    let busy = |reason: &str| {
        caller.refuse(connection, Refused::new(Code::Busy, reason, "try again in a second"));
        None
    };
    let now = Instant::now();
    let Some(permit) = agent.limits.enter(caller.share, now) else {
        // Not to be waited for. A request that has arrived is read, else its sender gets a reset.
        let _ = receive_request(connection.get_ref());
        return busy("too many requests of your container are open");
    };
    let counted = permit.counts(now);
    let read = connection.async_io(Interest::READABLE, |from| receive_request(from));
    let (asker, request) = match (asker, tokio::time::timeout(WAIT_MAX, read).await) {
        (Ok(asker), Ok(Ok(Ok(request)))) => (asker, request),
        (Err(refused), Ok(Ok(_))) | (Ok(_), Ok(Ok(Err(refused)))) => {
            caller.refuse(connection, refused);
            return None;
        }
        // It hung up, or says nothing.
        (_, Ok(Err(_)) | Err(_)) => return None,
    };
    match request.wait_ms {
        Some(_) => {
            let queued = Answer::refusal(Refused::new(Code::Queued, "others come first", ""));
            let _ = send_answer(connection.get_ref(), &queued, &[]);
        }
        None if counted => {}
        None => return busy("your container asks too often"),
    }
    // One that does not say how long it waits hangs up.
    let patience = request
        .wait_ms
        .map_or(Duration::MAX, |ms| Duration::from_millis(ms.into()).min(PATIENCE_MAX));
    let _turn = tokio::select! {
        turn = tokio::time::timeout(patience, permit.turn(counted)) => match turn {
            Ok(turn) => turn?,
            Err(_) => return busy("too many come first"),
        },
        // Nothing is worked for a program that gave up.
        _ = ended(connection) => {
            caller.lost();
            return None;
        }
    };
    let worker = Arc::clone(agent);
    let work = tokio::task::spawn_blocking(move || {
        let opened = worker.open(&asker, &request);
        (asker, opened)
    });
    let (asker, opened) = work.await.ok()?;
    match opened {
        Ok((given, port)) => Some((asker, given, port)),
        Err(refused) => {
            caller.refuse(connection, refused);
            None
        }
    }
}

/// Waits until the other side hangs up or sends something.
pub(crate) async fn ended(connection: &AsyncFd<Foreign<OwnedFd>>) -> io::Result<usize> {
    // A peek leaves a message with its descriptors where it is.
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let read = |from: &Foreign<OwnedFd>| Ok(recv(from, &mut [0_u8; 1][..], flags)?.0);
    connection.async_io(Interest::READABLE, read).await
}

impl Agent {
    /// Writes the sums of the log.
    fn sum(&self) {
        let known = self.containers.count_forged();
        self.journal.sum(&known, Instant::now());
    }

    /// Puts the options of the file in force that can change now, and says which they are.
    fn reload(&self) {
        let Some(file) = &self.file else {
            tracing::warn!("no --config was given, so nothing was read again");
            return;
        };
        let old = self.containers.config();
        let mut fresh = match Config::read(file) {
            Ok(fresh) => fresh,
            Err(error) => {
                tracing::error!("the configuration stays as it was: {error}");
                return;
            }
        };
        let (kept, changed) = (fresh.keep(&old), fresh.differences(&old));
        log::set_level(fresh.log);
        self.containers.configure(fresh);
        self.containers.shape_all();
        // Those that are permitted begin again.
        self.captures.end_all();
        if !kept.is_empty() {
            let options = kept.join(", ");
            tracing::warn!("a change of {options} needs a restart of the agent");
        }
        tracing::info!(changed = changed.join(", "), "the configuration was read again");
    }

    /// Works a command.
    fn obey(&self, command: &control::Request, each: &mut dyn FnMut(Reply)) {
        let name = command.name.as_deref();
        match command.command {
            Verb::Status => {
                let reports = self.containers.report(name);
                if let (Some(name), true) = (name, reports.is_empty()) {
                    let reason = format!("no container is called {name:?}");
                    return each(Reply::Refused { reason });
                }
                each(Reply::Agent(self.status()));
                reports.into_iter().for_each(|report| each(Reply::Container(Box::new(report))));
            }
            Verb::Watch => each(Reply::Agent(self.status())),
            Verb::Claim | Verb::Unclaim | Verb::Claims => self.containers.claims(command, each),
            Verb::Release => self.containers.release(name, command.force, each),
            Verb::Introduce | Verb::Check => {
                let name = match &command.about {
                    Some(about) => self.introduce(command.command, about),
                    None => Err(Refused::new(Code::Failed, "the container is missing", "")),
                };
                each(match name {
                    Ok(name) => Reply::Introduced { name },
                    Err(refused) => Reply::Refused { reason: refused.to_string() },
                });
            }
        }
    }

    fn status(&self) -> AgentStatus {
        let Totals { containers, ports, bytes } = self.containers.totals();
        AgentStatus {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: self.since.elapsed().as_secs(),
            containers,
            ports,
            bytes,
            requests: self.journal.requests(None),
            uplinks: self.containers.uplinks(),
        }
    }

    /// The facts for a scrape, or of the container of this name, with its queue pairs: each
    /// container costs several questions to the kernel.
    fn facts(&self, of: Option<&str>) -> Facts {
        let mut all = BTreeMap::<String, ContainerFacts>::new();
        for status in self.containers.report(of) {
            let it = ContainerFacts { requests: status.requests.clone(), ..Default::default() };
            all.insert(status.name.clone(), ContainerFacts { status: Some(status), ..it });
        }
        let mut uses = self.pages.uses();
        let ends = self.ends.all().ok();
        for sums in self.pages.sums(ends.as_ref(), of) {
            let it = all.entry(sums.name).or_default();
            it.requests = self.journal.requests(Some(Share::Container(sums.namespace)));
            it.rdma = uses.remove(&sums.namespace).unwrap_or_default();
            it.devices = sums.devices;
        }
        let mut links = link_counts().unwrap_or_default();
        for (index, queued) in queues().unwrap_or_default() {
            let end = ends.as_ref().and_then(|ends| ends.get(&index));
            let queues = end.and_then(|end| all.get_mut(&end.name));
            queues.into_iter().for_each(|it| it.queued = Some(queued));
        }
        let mut link_of = |name: &str| links.remove(name);
        let named =
            all.into_iter().map(|(name, it)| ContainerFacts { link: link_of(&name), name, ..it });
        Facts {
            agent: self.status(),
            waits: self.journal.waits(),
            ring: self.containers.ring_memory(),
            containers: named.collect(),
        }
    }

    /// Makes a container known, or checks that it is. Returns the name of the host's end.
    fn introduce(&self, verb: Verb, about: &About) -> Result<String, Refused> {
        let unreadable = |e: io::Error| {
            let reason = format!("{}: {e}", about.namespace.display());
            Refused::new(Code::Failed, reason, "is it a network namespace?")
        };
        let namespace = Namespace::open(about.namespace.clone()).map_err(unreadable)?;
        let is_administered_by_itself = namespace.is_of_its_container(&self.own)?;
        if verb == Verb::Check {
            let name = self.containers.introduced(&namespace, about)?;
            return name.ok_or_else(|| Refused::new(Code::Interface, "it is not known", ""));
        }
        Ok(self.containers.introduce(&namespace, about, is_administered_by_itself)?.name)
    }

    /// The answer to a request, and the ports that it hands over.
    fn open(&self, asker: &Asker, request: &Request) -> Result<(Given, Option<PortId>), Refused> {
        let called = asker.called();
        let hints = Hints {
            interface: request.interface,
            is_administered_by_itself: asker.is_administered_by_itself,
            about: None,
            called: called.as_ref(),
        };
        let found = self.containers.find(&asker.namespace, hints).inspect_err(|_| {
            let share @ Share::Container(_) = self.ends.share_of(asker, &self.own) else { return };
            called.iter().for_each(|it| self.journal.calls(share, it));
        })?;
        let (room, limits) = self.containers.reserve(found.end(), request)?;
        // The kernel takes its time with both. The port is handed over when the program is there.
        let (attached, given) = std::thread::scope(|scope| {
            let attach = scope.spawn(|| self.containers.attach(found));
            let given = asker.namespace.run(|| give(request, &limits));
            (attach.join(), given)
        });
        attached.unwrap_or_else(|_| Err(Refused::new(Code::Failed, "the agent failed", "")))?;
        let mut given = given?;
        steps::reached("port opened");
        asker.check_again()?;
        let port = match &given.answer.outcome {
            Ok(_) => {
                let sockets = given.sockets().map(holders::inode).collect::<io::Result<_>>();
                let sockets = sockets.map_err(|e| Refused::new(Code::Failed, e.to_string(), ""))?;
                Some(room.fill(sockets, &mut given)?)
            }
            Err(_) => None,
        };
        steps::reached("port recorded");
        Ok((given, port))
    }
}
