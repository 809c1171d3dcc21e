//! Metrics and facts for an operator's Prometheus, over HTTP on loopback or a Unix socket. No
//! process needs a right to ask, and nothing can be changed.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Mutex, Semaphore};

use crate::journal::Seldom;
use crate::metrics::{self, Facts, Format};

/// Connections at a time.
const CLIENTS_MAX: usize = 16;
/// The longest that a client may take for its request, and for all.
const HEADER_MAX: Duration = Duration::from_secs(2);
const ALL_MAX: Duration = Duration::from_secs(20);
/// How long to leave connections alone that cannot be accepted.
const REST: Duration = Duration::from_millis(100);
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 8 << 10;

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

/// The socket.
#[derive(Debug)]
pub(crate) enum Listening {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listening {
    /// At an address, or at a path that begins with a slash: with this mode, and in the place of a
    /// socket that an earlier agent left. Error: another process listens there, or there is no such
    /// address or directory.
    pub(crate) async fn at(place: &str, mode: u32) -> io::Result<Self> {
        if !place.starts_with('/') {
            let address: SocketAddr = place.parse().map_err(io::Error::other)?;
            return TcpListener::bind(address).await.map(Self::Tcp);
        }
        let listener = match UnixListener::bind(place) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_left(Path::new(place)) => {
                std::fs::remove_file(place)?;
                UnixListener::bind(place)?
            }
            bound => bound?,
        };
        let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
        std::fs::set_permissions(place, mode)?;
        Ok(Self::Unix(listener))
    }
}

/// Whether no process listens at a socket.
fn is_left(path: &Path) -> bool {
    let connected = std::os::unix::net::UnixStream::connect(path);
    connected.is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}

/// Serves for ever. `facts` looks: with the queue pairs of the container with this name.
pub(crate) async fn serve<F>(listening: Listening, facts: F)
where
    F: Fn(Option<&str>) -> Facts + Send + Sync + 'static,
{
    let (places, facts) = (Arc::new(Semaphore::new(CLIENTS_MAX)), Arc::new(facts));
    // One look at a time.
    let turn = Arc::<Mutex<()>>::default();
    let mut failed = Seldom::default();
    loop {
        let (facts, turn) = (Arc::clone(&facts), Arc::clone(&turn));
        let accepted = match &listening {
            Listening::Tcp(it) => it.accept().await.map(|(it, _)| Box::new(it) as Box<dyn Stream>),
            Listening::Unix(it) => it.accept().await.map(|(it, _)| Box::new(it) as Box<dyn Stream>),
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                if failed.permits(Instant::now()) {
                    tracing::error!("no metrics are served: {error}");
                }
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        tokio::spawn(async move {
            let _place = place;
            let answer = move |request: Request<Incoming>| {
                let (facts, turn) = (Arc::clone(&facts), Arc::clone(&turn));
                async move { Ok::<_, Infallible>(answered(request, facts, turn).await) }
            };
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(HEADER_MAX);
            server.max_buf_size(HEAD_BYTES_MAX).keep_alive(false);
            let served = server.serve_connection(TokioIo::new(stream), service_fn(answer));
            let _ = tokio::time::timeout(ALL_MAX, served).await;
        });
    }
}

/// A connection of either kind.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

async fn answered<F>(
    request: Request<Incoming>,
    facts: Arc<F>,
    turn: Arc<Mutex<()>>,
) -> Response<Full<Bytes>>
where
    F: Fn(Option<&str>) -> Facts + Send + Sync + 'static,
{
    let plain = |status, text: &'static str| response(status, TEXT, text.into());
    if request.method() != Method::GET {
        return plain(StatusCode::METHOD_NOT_ALLOWED, "GET alone\n");
    }
    let accepted = request.headers().get_all(ACCEPT).iter();
    let mut accepted = accepted.filter_map(|it| it.to_str().ok());
    let format = match accepted.any(|it| it.contains("application/openmetrics-text")) {
        true => Format::OpenMetrics,
        false => Format::Prometheus,
    };
    let Some(page) = Page::at(request.uri().path()) else {
        let all = "/metrics, /v1/containers, /v1/containers/NAME, /v1/node and /healthz\n";
        return plain(StatusCode::NOT_FOUND, all);
    };
    if page == Page::Health {
        return plain(StatusCode::OK, "ok\n");
    }
    let turn = turn.lock_owned().await;
    let work = move || {
        let _turn = turn;
        page.answer(&*facts, format)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Some((kind, text))) => response(StatusCode::OK, kind, text),
        Ok(None) => plain(StatusCode::NOT_FOUND, "no container is called that\n"),
        Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR, "the agent failed\n"),
    }
}

fn response(status: StatusCode, kind: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let kind = hyper::header::HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// The paths.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Page {
    Health,
    Metrics,
    Node,
    Containers,
    Container(String),
}

impl Page {
    fn at(path: &str) -> Option<Self> {
        Some(match path {
            "/healthz" => Self::Health,
            "/metrics" => Self::Metrics,
            "/v1/node" => Self::Node,
            "/v1/containers" => Self::Containers,
            _ => Self::Container(path.strip_prefix("/v1/containers/")?.to_owned()),
        })
    }

    /// The kind of text, and the text.
    fn answer(
        &self,
        facts: &impl Fn(Option<&str>) -> Facts,
        format: Format,
    ) -> Option<(&'static str, String)> {
        match self {
            Self::Health => Some((TEXT, "ok\n".into())),
            Self::Metrics => {
                Some((format.content_type(), metrics::text(facts(None), format).ok()?))
            }
            Self::Node => Some((JSON, metrics::node(&facts(None)).to_string())),
            Self::Containers => Some((JSON, metrics::containers(&facts(None)).to_string())),
            Self::Container(name) => {
                Some((JSON, metrics::container(&facts(Some(name)), name)?.to_string()))
            }
        }
    }
}
