//! Examples of the verbs API: see `src/bin`. This crate contains only their common command line.

use std::net::IpAddr;

use rocinante::{Context, OpenOptions, VerbsError};

/// The program in the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// The port of the examples' servers, in the connection manager's port space of TCP.
pub const PORT: u16 = 18_600;

/// Words of a command line, and the options among them; each option takes a value.
#[derive(Debug, Default)]
pub struct Args {
    /// `--bind`: the own address.
    pub bind: Option<IpAddr>,
    /// `--device`: the device that has the address, if not the one in software; see
    /// [`OpenOptions::device`].
    pub device: Option<String>,
    /// `--port`: the server's port, if it is not [`PORT`].
    pub port: Option<u16>,
    /// `--iters`: the number of iterations.
    pub iters: Option<u64>,
    /// `--connections`: the number of connections.
    pub connections: Option<u64>,
    /// `--size`: the number of bytes.
    pub size: Option<usize>,
    /// All other words.
    pub words: Vec<String>,
}

impl Args {
    /// Reads the command line, or prints `usage` and ends the process with status 2.
    #[must_use]
    pub fn read(usage: &str) -> Self {
        Self::parse(std::env::args().skip(1)).unwrap_or_else(|why| {
            eprintln!("{why}\n\n{usage}");
            std::process::exit(2);
        })
    }

    /// Opens the device with `address`.
    ///
    /// # Errors
    /// As [`OpenOptions::open`].
    pub fn open(&self, address: IpAddr) -> Result<Context, VerbsError> {
        let options = OpenOptions::new();
        match &self.device {
            Some(name) => options.device(name).open(address),
            None => options.open(address),
        }
    }

    fn parse(mut given: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut args = Self::default();
        while let Some(word) = given.next() {
            let Some(name) = word.strip_prefix("--") else {
                args.words.push(word);
                continue;
            };
            let value = given.next().ok_or_else(|| format!("{word} needs a value"))?;
            let bad = |_| format!("{word} cannot be {value:?}");
            match name {
                "bind" => args.bind = Some(value.parse().map_err(|_| bad(()))?),
                "device" => args.device = Some(value),
                "port" => args.port = Some(value.parse().map_err(|_| bad(()))?),
                "iters" => args.iters = Some(value.parse().map_err(|_| bad(()))?),
                "connections" => args.connections = Some(value.parse().map_err(|_| bad(()))?),
                "size" => args.size = Some(value.parse().map_err(|_| bad(()))?),
                _ => return Err(format!("there is no option {word}")),
            }
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_words_in_any_order() {
        let args = |line: &str| Args::parse(line.split(' ').map(str::to_owned));
        let found = args("put --bind 127.0.0.2 --device rxe0 127.0.0.1 --size 7 key").unwrap();
        assert_eq!(found.device.as_deref(), Some("rxe0"));
        assert_eq!(found.bind, Some([127, 0, 0, 2].into()));
        assert_eq!((found.size, found.words.join(" ")), (Some(7), "put 127.0.0.1 key".to_owned()));
        assert!(
            args("--size x").is_err() && args("--bind").is_err() && args("--colour red").is_err()
        );
    }
}
