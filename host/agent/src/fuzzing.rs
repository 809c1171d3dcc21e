//! Entry points for fuzz targets only: what other processes say, as functions of bytes. Each panics
//! where a message is beyond its bounds, or is another one when it is written and read again.

use crate::called::Called;
use crate::control::{CALLED_MAX, MESSAGE_BYTES_MAX, Reply, Request, line};
use crate::hook;

/// A message of the control socket, as the agent and as a client read it.
pub fn command(bytes: &[u8]) {
    if let Ok(request) = Request::decode(bytes) {
        if let Some(about) = &request.about {
            assert!(about.id.len() <= CALLED_MAX && about.engine.len() <= CALLED_MAX);
        }
        assert_eq!(Request::decode(&line(&request)), Ok(request));
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(bytes) {
        let line = line(&reply);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(serde_json::from_slice::<Reply>(&line).expect("it is read"), reply);
    }
}

/// A container's state, as an engine hands it to the hook.
pub fn state(bytes: &[u8]) {
    let Ok(about) = hook::about(bytes) else { return };
    let process = about.namespace.to_str().and_then(|path| path.strip_prefix("/proc/"));
    let process = process.and_then(|path| path.strip_suffix("/ns/net")).expect("of a process");
    assert!(process.parse::<u32>().is_ok_and(|pid| pid > 0), "{process}");
    assert!(about.interface.is_none());
    assert!(line(&Request::introducing(about)).len() <= MESSAGE_BYTES_MAX);
}

/// The file with the control groups of a process.
pub fn groups(bytes: &[u8]) {
    let Some(called) = Called::of_groups(&String::from_utf8_lossy(bytes)) else { return };
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    assert!(called.id.len() <= 76 && called.id.bytes().all(is_plain), "{called:?}");
    assert!(called.engine.len() <= 10 && called.to_string().len() <= 87, "{called:?}");
}
