//! HTTP/1.1 for schedulers and operators: bounded bodies, heads and times.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::extender::Extender;
use crate::pfs::Pfs;

/// Bytes of a request's body: 500 nodes as a scheduler sends them are about 5 MB.
pub const BODY_MAX: usize = 10 << 20;
/// Connections at a time.
const CLIENTS_MAX: usize = 256;
/// The longest that a client may take for a head, so also the longest that a connection may rest.
/// Go keeps one for 90 s.
const HEAD_MAX: Duration = Duration::from_secs(100);
/// The longest that a client may take for a body.
const BODY_TIME_MAX: Duration = Duration::from_secs(10);
/// How long to leave connections alone that cannot be accepted.
const REST: Duration = Duration::from_millis(100);

const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

type Answer = Response<Full<Bytes>>;

/// The answers at the paths.
#[derive(Clone)]
pub(crate) enum Service {
    Extender(Extender),
    Node(Pfs),
}

/// Serves for ever.
pub(crate) async fn serve(listener: TcpListener, service: Service) {
    let places = Arc::new(Semaphore::new(CLIENTS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::error!("no connection is accepted: {error}");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let service = service.clone();
        tokio::spawn(async move {
            let _place = place;
            let answer = move |request: Request<Incoming>| {
                let service = service.clone();
                async move { Ok::<_, Infallible>(service.answer(request).await) }
            };
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(HEAD_MAX);
            let served = server.serve_connection(TokioIo::new(stream), service_fn(answer));
            if let Err(error) = served.await {
                tracing::debug!("a connection ended: {error}");
            }
        });
    }
}

impl Service {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (head, body) = request.into_parts();
        let path = head.uri.path();
        if path == "/healthz" {
            return match self.ready() {
                Ok(()) => answer(StatusCode::OK, TEXT, "ok\n".into()),
                Err(why) => answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
            };
        }
        match self {
            Self::Node(pfs) if path == "/getpfs" => match pfs.text() {
                Ok(text) => answer(StatusCode::OK, JSON, text),
                Err(why) => answer(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
            },
            Self::Node(_) => nothing_there("/getpfs and /healthz"),
            Self::Extender(extender) => {
                let Some(verb) = Verb::at(path) else {
                    let verbs = "/scheduler/filter, /scheduler/prioritize, /scheduler/bind";
                    return nothing_there(&format!("{verbs} and /healthz"));
                };
                if head.method != Method::POST {
                    return answer(StatusCode::METHOD_NOT_ALLOWED, TEXT, "POST alone\n".into());
                }
                match collected(body).await {
                    Ok(body) => verb.done(extender, &body).await,
                    Err((status, why)) => answer(status, TEXT, format!("{why}\n")),
                }
            }
        }
    }

    fn ready(&self) -> Result<(), String> {
        match self {
            Self::Extender(extender) => extender.ready(),
            Self::Node(pfs) => pfs.ready(),
        }
    }
}

#[derive(Clone, Copy)]
enum Verb {
    Filter,
    Prioritize,
    Bind,
}

impl Verb {
    fn at(path: &str) -> Option<Self> {
        match path {
            "/scheduler/filter" => Some(Self::Filter),
            "/scheduler/prioritize" => Some(Self::Prioritize),
            "/scheduler/bind" => Some(Self::Bind),
            _ => None,
        }
    }

    async fn done(self, extender: &Extender, body: &[u8]) -> Answer {
        match self {
            Self::Filter => answer(StatusCode::OK, JSON, extender.filter(body)),
            Self::Bind => answer(StatusCode::OK, JSON, extender.bind(body).await),
            Self::Prioritize => match extender.prioritize(body) {
                Ok(text) => answer(StatusCode::OK, JSON, text),
                Err(why) => answer(StatusCode::BAD_REQUEST, TEXT, format!("{why}\n")),
            },
        }
    }
}

/// Error: the status and the reason of a refusal.
async fn collected(body: Incoming) -> Result<Bytes, (StatusCode, String)> {
    match tokio::time::timeout(BODY_TIME_MAX, Limited::new(body, BODY_MAX).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            Err((StatusCode::PAYLOAD_TOO_LARGE, format!("a request has {BODY_MAX} bytes at most")))
        }
        Ok(Err(error)) => Err((StatusCode::BAD_REQUEST, error.to_string())),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the request came too slowly".into())),
    }
}

fn nothing_there(paths: &str) -> Answer {
    answer(StatusCode::NOT_FOUND, TEXT, format!("{paths}\n"))
}

fn answer(status: StatusCode, kind: &'static str, text: String) -> Answer {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
