//! The claims that are prepared: one file, and for each claim a file of CDI. Drivers of one node
//! change them in turn, under a lock that each call has.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::claim::{Record, is_id};

const STATE: &str = "state.json";
const LOCK: &str = "lock";
/// Files of CDI of claims begin and end so.
const CDI: (&str, &str) = ("rocinante.dev-claim_", ".json");

/// The longest that a call waits for others: the kubelet gives up after 45 s.
const LOCK_MAX: Duration = Duration::from_secs(20);
const LOCK_PERIOD: Duration = Duration::from_millis(2);

pub(crate) type Records = BTreeMap<String, Record>;

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    claims: Records,
}

/// Of any version.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

const VERSION: u32 = 1;

/// Where the files are.
#[derive(Clone)]
pub(crate) struct Store {
    pub(crate) folder: PathBuf,
    cdi: PathBuf,
}

/// The right to change them.
pub(crate) struct Locked<'a> {
    store: &'a Store,
    pub(crate) records: Records,
    /// Whether the file made no sense. The files of CDI say which claims there were.
    pub(crate) is_lost: bool,
    _lock: File,
}

/// A folder that other users do not read.
pub(crate) fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(path)
}

/// Puts a file in the place of one, whole or not at all.
fn replace(path: &Path, text: &[u8], mode: u32) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let write = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&fresh)?;
        file.write_all(text)?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    write().inspect_err(|_| _ = fs::remove_file(&fresh))
}

fn is_gone<T: Default>(error: io::Error) -> io::Result<T> {
    match error.kind() {
        io::ErrorKind::NotFound => Ok(T::default()),
        _ => Err(error),
    }
}

impl Store {
    pub(crate) fn new(folder: PathBuf, cdi: PathBuf) -> Self {
        Self { folder, cdi }
    }

    /// The claims as they are written. Error: the file cannot be read, makes no sense
    /// (`InvalidData`), or is of another driver's version.
    pub(crate) fn read(&self) -> io::Result<Records> {
        let path = self.folder.join(STATE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) => return is_gone(error),
        };
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        let Version { version } = serde_json::from_slice(&text).map_err(invalid)?;
        if version != VERSION {
            let what = format!("{} has version {version}, not {VERSION}", path.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        serde_json::from_slice(&text).map(|it: Content| it.claims).map_err(invalid)
    }

    /// Waits for other calls, of this driver and of others.
    pub(crate) async fn locked(&self) -> io::Result<Locked<'_>> {
        make_folder(&self.folder)?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(self.folder.join(LOCK))?;
        let until = Instant::now() + LOCK_MAX;
        while let Err(error) = lock.try_lock() {
            if Instant::now() > until {
                return Err(error.into());
            }
            tokio::time::sleep(LOCK_PERIOD).await;
        }
        let (records, is_lost) = match self.read() {
            Ok(records) => (records, false),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                let path = self.folder.join(STATE);
                tracing::error!("{} is moved away: {error}", path.display());
                fs::rename(&path, path.with_extension("bad"))?;
                (Records::new(), true)
            }
            Err(error) => return Err(error),
        };
        Ok(Locked { store: self, records, is_lost, _lock: lock })
    }

    fn cdi(&self, uid: &str) -> PathBuf {
        self.cdi.join(format!("{}{uid}{}", CDI.0, CDI.1))
    }

    /// The files of CDI that are there, by the UIDs of their claims.
    pub(crate) fn cdi_files(&self) -> io::Result<BTreeMap<String, Value>> {
        let entries = match fs::read_dir(&self.cdi) {
            Ok(entries) => entries,
            Err(error) => return is_gone(error),
        };
        let mut files = BTreeMap::new();
        for entry in entries {
            let name = entry?.file_name();
            let name = name.to_str().and_then(|it| it.strip_prefix(CDI.0));
            if let Some(uid) = name.and_then(|it| it.strip_suffix(CDI.1)).filter(|it| is_id(it)) {
                let text = fs::read(self.cdi(uid)).unwrap_or_default();
                files.insert(uid.to_owned(), serde_json::from_slice(&text).unwrap_or_default());
            }
        }
        Ok(files)
    }
}

impl Locked<'_> {
    pub(crate) fn write(&self) -> io::Result<()> {
        let content = Content { version: VERSION, claims: self.records.clone() };
        replace(&self.store.folder.join(STATE), &serde_json::to_vec(&content)?, 0o600)
    }

    /// Has the file say what the claim is.
    pub(crate) fn insert(&mut self, record: &Record) -> io::Result<()> {
        let before = self.records.insert(record.uid.clone(), record.clone());
        if before.as_ref() == Some(record) { Ok(()) } else { self.write() }
    }

    /// Has the file of CDI say what the claim is.
    pub(crate) fn write_cdi(&self, record: &Record) -> io::Result<()> {
        let (path, wanted) = (self.store.cdi(&record.uid), record.cdi());
        let text = fs::read(&path).unwrap_or_default();
        if serde_json::from_slice::<Value>(&text).is_ok_and(|it| it == wanted) {
            return Ok(());
        }
        fs::create_dir_all(&self.store.cdi)?;
        // A runtime reads it, of any user.
        replace(&path, wanted.to_string().as_bytes(), 0o644)
    }

    /// Removes a claim and its file of CDI.
    pub(crate) fn remove(&mut self, uid: &str) -> io::Result<()> {
        let path = self.store.cdi(uid);
        // A driver that was killed may have left it.
        let _ = fs::remove_file(path.with_extension("new"));
        fs::remove_file(path).or_else(is_gone)?;
        match self.records.remove(uid) {
            Some(_) => self.write(),
            None => Ok(()),
        }
    }
}
