//! The agent's side of the commands.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::net::{RecvFlags, ReturnFlags, SendFlags, recvmsg, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch::Receiver;
use tokio::sync::{Mutex, Semaphore, mpsc};

use super::{MESSAGE_BYTES_MAX, Reply, Request, Verb, line};
use crate::closers::Foreign;
use crate::limits::Share;
use crate::ready::ready;

/// Connections that are read at a time. More wait: an engine may start all its containers at once.
const CLIENTS_MAX: usize = 16;
/// The longest that a client may take to send its command, or to make room for a reply.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Clients {
    places: Arc<Semaphore>,
    /// One command is worked at a time.
    turn: Arc<Mutex<()>>,
}

impl Default for Clients {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(CLIENTS_MAX)), turn: Arc::default() }
    }
}

impl Clients {
    /// Reads the command of a connection, has it worked on a thread of its own, and sends the
    /// replies for as long as the client reads them. The work goes on without it. A client that
    /// watches has it worked again at each news, until it hangs up.
    pub(crate) async fn serve(
        &self,
        connection: Foreign<OwnedFd>,
        mut news: Receiver<()>,
        work: impl Fn(&Request, &mut dyn FnMut(Reply)) + Clone + Send + 'static,
    ) {
        // The agent's own user, and root: the file's mode says the same.
        let Ok(peer) = getsockopt(&connection, PeerCredentials) else { return };
        let connection = connection.of(Share::User(peer.uid()));
        if ![0, rustix::process::geteuid().as_raw()].contains(&peer.uid()) {
            return;
        }
        let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { return };
        let both = Interest::READABLE | Interest::WRITABLE;
        let Ok(connection) = ready(connection, both) else { return };
        let request = tokio::time::timeout(PATIENCE, received(&connection)).await;
        let Ok(Ok(request)) = request else { return };
        let request = match request.and_then(|bytes| Request::decode(&bytes)) {
            Ok(request) => request,
            Err(reason) => {
                let _ = sent(&connection, &Reply::Refused { reason }).await;
                return;
            }
        };
        let mut request = request;
        if let Some(about) = &mut request.about {
            // By its root: it may see other files and processes.
            let seen = about.namespace.strip_prefix("/").unwrap_or(&about.namespace);
            about.namespace = Path::new(&format!("/proc/{}/root", peer.pid())).join(seen);
        }
        let (request, mut place) = (Arc::new(request), Some(place));
        loop {
            news.mark_unchanged();
            let turn = Arc::clone(&self.turn).lock_owned().await;
            // As many as there are containers.
            let (to, mut from) = mpsc::unbounded_channel();
            let (asked, work) = (Arc::clone(&request), work.clone());
            tokio::task::spawn_blocking(move || {
                let _turn = turn;
                // The client may have gone.
                work(&asked, &mut |reply| drop(to.send(reply)));
            });
            while let Some(reply) = from.recv().await {
                if sent(&connection, &reply).await.is_err() {
                    return;
                }
            }
            if request.command != Verb::Watch {
                break;
            }
            // Others need it.
            place = None;
            tokio::select! {
                Ok(()) = news.changed() => {}
                // The client hung up, or sent more than its command.
                _ = received(&connection) => return,
            }
        }
        drop(place);
        let _ = sent(&connection, &Reply::Done {}).await;
    }
}

/// The message of a client. The inner error is what to answer.
async fn received(from: &AsyncFd<Foreign<OwnedFd>>) -> io::Result<Result<Vec<u8>, String>> {
    let read = |from: &Foreign<OwnedFd>| {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let mut into = [io::IoSliceMut::new(&mut bytes)];
        // A message with descriptors stays where it is: the kernel would close them here.
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let peeked = recvmsg(from, &mut [], &mut Default::default(), flags)?;
        if peeked.flags.contains(ReturnFlags::CTRUNC) {
            return Ok(Err("a command has no descriptors".to_owned()));
        }
        let got = recvmsg(from, &mut into, &mut Default::default(), RecvFlags::DONTWAIT)?;
        if got.flags.contains(ReturnFlags::TRUNC) {
            return Ok(Err("the command is too long".to_owned()));
        }
        bytes.truncate(got.bytes);
        Ok(Ok(bytes))
    };
    from.async_io(Interest::READABLE, read).await
}

async fn sent(to: &AsyncFd<Foreign<OwnedFd>>, reply: &Reply) -> io::Result<()> {
    let line = line(reply);
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let write = |to: &Foreign<OwnedFd>| Ok(send(to, &line, flags).map(drop)?);
    let sent = to.async_io(Interest::WRITABLE, write);
    tokio::time::timeout(PATIENCE, sent).await.map_err(|_| io::ErrorKind::TimedOut)?
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, recv, socketpair};
    use tokio::sync::watch;

    use super::*;
    use crate::closers::Closers;

    /// The replies to a message, of work that sends this number of them, to a client that reads
    /// `read` of them; and the time until it is served.
    fn served(message: &[u8], replies: usize, read: usize) -> (Vec<String>, Duration) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (client, agents) = pair.expect("a pair");
        send(&client, message, SendFlags::empty()).expect("sent");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let begun = Instant::now();
        let said = runtime.expect("a runtime").block_on(async {
            let connection = Foreign::new(agents, Share::Stranger, &Arc::<Closers>::default());
            let (_to, news) = watch::channel(());
            let work = move |_: &Request, each: &mut dyn FnMut(Reply)| {
                (0..replies).for_each(|at| each(Reply::Released { name: at.to_string() }));
            };
            let clients = Clients::default();
            let client = ready(client, Interest::READABLE).expect("a descriptor");
            let reading = async {
                let mut said = Vec::new();
                while said.len() < read {
                    let mut bytes = [0; 4096];
                    let got = client.async_io(Interest::READABLE, |from| {
                        Ok(recv(from, &mut bytes[..], RecvFlags::DONTWAIT)?.0)
                    });
                    match got.await.expect("received") {
                        0 => break,
                        length => said.push(String::from_utf8_lossy(&bytes[..length]).into_owned()),
                    }
                }
                said
            };
            tokio::join!(clients.serve(connection, news, work), reading).1
        });
        (said, begun.elapsed())
    }

    const STATUS: &[u8] = br#"{"version":1,"command":"status"}"#;

    #[test]
    fn a_client_that_reads_gets_all() {
        let (said, _) = served(STATUS, 5000, usize::MAX);
        assert_eq!(said.len(), 5001);
        assert_eq!(said[4999], "{\"released\":{\"name\":\"4999\"}}\n");
        assert_eq!(said[5000], "{\"done\":{}}\n");
    }

    #[test]
    fn many_clients_at_once_are_all_answered() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let clients = Arc::new(Clients::default());
        let (_to, news) = watch::channel(());
        let works = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let flags = SocketFlags::CLOEXEC;
        let mut ends = Vec::new();
        runtime.expect("a runtime").block_on(async {
            let mut all = tokio::task::JoinSet::new();
            for _ in 0..4 * CLIENTS_MAX {
                let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
                let (client, agents) = pair.expect("a pair");
                rustix::io::ioctl_fionbio(&agents, true).expect("as it is accepted");
                send(&client, STATUS, SendFlags::empty()).expect("sent");
                let connection = Foreign::new(agents, Share::Stranger, &Arc::<Closers>::default());
                let (clients, works) = (Arc::clone(&clients), Arc::clone(&works));
                let news = news.clone();
                let work = move |_: &Request, _: &mut dyn FnMut(Reply)| {
                    works.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                };
                all.spawn(async move { clients.serve(connection, news, work).await });
                ends.push(client);
            }
            while all.join_next().await.is_some() {}
        });
        assert_eq!(works.load(std::sync::atomic::Ordering::Relaxed), ends.len());
        for client in ends {
            let mut bytes = [0; 64];
            let got = recv(&client, &mut bytes[..], RecvFlags::empty()).expect("received").0;
            assert_eq!(&bytes[..got], b"{\"done\":{}}\n");
        }
    }

    #[test]
    fn a_client_that_stops_reading_is_left() {
        let (said, took) = served(STATUS, 50_000, 3);
        assert_eq!(said.len(), 3);
        assert!(took >= PATIENCE, "{took:?}");
    }

    #[test]
    fn a_message_that_is_no_command_is_refused_and_works_nothing() {
        let long = vec![b' '; MESSAGE_BYTES_MAX + 1];
        for (message, said) in
            [(&b"\xff\xfe"[..], "expected value"), (b"[]", "invalid"), (&long, "too long")]
        {
            let (replies, _) = served(message, 5, usize::MAX);
            assert_eq!(replies.len(), 1, "{replies:?}");
            assert!(replies[0].contains("refused") && replies[0].contains(said), "{replies:?}");
        }
    }
}
