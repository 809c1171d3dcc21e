//! An agent on the other side of a TCP connection.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::proto::Request;
use super::{Agent, Answer};
use crate::error::{Error, Result};

/// How long an answer may take, beyond the time that the request itself may wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// The advice if no agent answers.
const ADVICE: &str = "start it on the machine with the device by `cargo xtask interop agent`, and let TCP through to it";

/// A connection to [`serve`](super::serve).
#[derive(Debug)]
pub struct RemoteAgent {
    stream: BufReader<TcpStream>,
}

impl RemoteAgent {
    /// Connects to an agent. Retries for `patience` while nothing listens. Error: nothing listens.
    pub fn connect(address: SocketAddr, patience: Duration) -> Result<Self> {
        let deadline = Instant::now() + patience;
        let stream = loop {
            match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    let what = format!("no verbs agent answers at {address}: {error}: {ADVICE}");
                    return Err(Error::new(what));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    fn exchange(&mut self, request: &Request) -> Result<Answer> {
        let line = serde_json::to_string(request)? + "\n";
        self.stream.get_mut().write_all(line.as_bytes())?;
        let mut answer = String::new();
        if self.stream.read_line(&mut answer)? == 0 {
            return Err(Error::new("it closed the connection"));
        }
        Ok(serde_json::from_str(&answer)?)
    }
}

impl Agent for RemoteAgent {
    fn ask(&mut self, request: Request) -> Answer {
        let answer = self.exchange(&request);
        answer.unwrap_or_else(|error| Err(format!("the verbs agent is lost: {error}")))
    }
}
