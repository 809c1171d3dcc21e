//! Requests of kubelets that name the socket's path as their authority, as those before 1.26 do. A
//! path is none (RFC 3986), and hyper resets such a request. So each request of a connection gets
//! another authority before hyper reads it. All else stays as it is.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

const AUTHORITY: &[u8] = b"localhost";
/// RFC 9113: the client's preface, a frame's header, and the longest frame by default.
const PREFACE: usize = 24;
const HEADER: usize = 9;
const FRAME_MAX: usize = 1 << 14;
/// A frame of headers, and its flags.
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
const PRIORITY: u8 = 32;

/// A connection of a kubelet.
pub(crate) struct Renamed {
    stream: UnixStream,
    decoder: Decoder<'static>,
    has_preface: bool,
    /// Bytes that came and are no whole frame yet.
    came: Vec<u8>,
    /// Bytes that hyper has not read yet, from [`at`](Self::at) on.
    ready: Vec<u8>,
    at: usize,
}

impl Renamed {
    pub(crate) fn new(stream: UnixStream) -> Self {
        let (came, ready) = (Vec::new(), Vec::new());
        Self { stream, decoder: Decoder::new(), has_preface: false, came, ready, at: 0 }
    }

    /// Moves whole frames to those that are ready.
    fn take(&mut self) -> io::Result<()> {
        let mut taken = 0;
        loop {
            let rest = &self.came[taken..];
            let len = match (self.has_preface, rest) {
                (false, _) => PREFACE,
                (true, [a, b, c, ..]) => HEADER + u32::from_be_bytes([0, *a, *b, *c]) as usize,
                _ => HEADER,
            };
            if len > HEADER + FRAME_MAX {
                return Err(bad("a frame is too long"));
            }
            let Some(frame) = rest.get(..len) else { break };
            if self.has_preface && frame[3] == HEADERS {
                renamed(&mut self.decoder, frame, &mut self.ready)?;
            } else {
                self.ready.extend(frame);
            }
            self.has_preface = true;
            taken += len;
        }
        self.came.drain(..taken);
        Ok(())
    }
}

/// Adds a frame of headers with the other authority. Its strings are literals that no table keeps.
fn renamed(decoder: &mut Decoder<'_>, frame: &[u8], to: &mut Vec<u8>) -> io::Result<()> {
    let (header, payload) = frame.split_at(HEADER);
    let flags = header[4];
    if flags & END_HEADERS == 0 {
        return Err(bad("headers in several frames"));
    }
    let (mut from, mut end) = (0, payload.len());
    if flags & PADDED != 0 {
        (from, end) = (1, end.saturating_sub(payload.first().copied().unwrap_or(0).into()));
    }
    if flags & PRIORITY != 0 {
        from += 5;
    }
    let block = payload.get(from..end).ok_or_else(|| bad("padding"))?;
    let start = to.len();
    to.extend(header);
    let decoded = decoder.decode_with_cb(block, |name, value| {
        // Beyond the bound it is refused below.
        if to.len() - start <= HEADER + FRAME_MAX {
            let value = if &*name == b":authority" { AUTHORITY } else { &value };
            to.push(0);
            for text in [&name, value] {
                string(text, to);
            }
        }
    });
    decoded.map_err(|error| bad(&format!("headers: {error:?}")))?;
    let len = to.len() - start - HEADER;
    if len > FRAME_MAX {
        return Err(bad("headers are too long"));
    }
    let [_, a, b, c] = u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes();
    to[start..start + 3].copy_from_slice(&[a, b, c]);
    to[start + 4] = flags & (END_STREAM | END_HEADERS);
    Ok(())
}

/// A string of RFC 7541 (5.2), not compressed.
fn string(text: &[u8], to: &mut Vec<u8>) {
    const PREFIX: usize = 127;
    match text.len().checked_sub(PREFIX) {
        None => to.extend(u8::try_from(text.len())),
        Some(mut rest) => {
            to.push(PREFIX as u8);
            while rest >= 128 {
                to.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            to.push(rest as u8);
        }
    }
    to.extend(text);
}

fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl AsyncRead for Renamed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.at == this.ready.len() {
            (this.at, _) = (0, this.ready.clear());
            let mut bytes = [0; 4096];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.came.extend(read.filled());
            this.take()?;
        }
        let rest = &this.ready[this.at..];
        let len = rest.len().min(to.remaining());
        to.put_slice(&rest[..len]);
        this.at += len;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Renamed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
