//! Directories of the machine's in which the tree has entries: they are read behind the others.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::{DIR, dirent64};

use crate::{Answer as _, behind, is_mounted, root, set_errno};

/// Additional entries of a directory of the machine's: it, and the names.
const ALSO: [(&CStr, &[&CStr]); 3] = [
    (c"/sys/class", &[c"infiniband", c"infiniband_mad", c"infiniband_verbs"]),
    (c"/sys/devices", &[c"rocinante"]),
    (c"/dev", &[c"infiniband"]),
];

/// A directory whose own entries have all been read.
struct Rest {
    stream: AtomicPtr<DIR>,
    next: AtomicUsize,
    entry: std::cell::UnsafeCell<MaybeUninit<dirent64>>,
}

// SAFETY: only the thread that reads the stream uses the entry.
unsafe impl Sync for Rest {}

static RESTS: [Rest; 8] = [const {
    Rest {
        stream: AtomicPtr::new(ptr::null_mut()),
        next: AtomicUsize::new(0),
        entry: std::cell::UnsafeCell::new(MaybeUninit::zeroed()),
    }
}; 8];

/// The next entry that the tree adds to a directory of the machine's.
unsafe fn also(stream: *mut DIR) -> *mut dirent64 {
    let same = |fd: c_int, path: &CStr, flags: c_int| {
        // SAFETY: all zeroes is a value of this plain structure, which the kernel writes.
        unsafe {
            let mut found: libc::stat = std::mem::zeroed();
            let into = &raw mut found;
            let status = libc::syscall(libc::SYS_newfstatat, fd, path.as_ptr(), into, flags);
            (status == 0).then_some((found.st_dev, found.st_ino))
        }
    };
    // SAFETY: the caller's stream.
    let fd = unsafe { libc::dirfd(stream) };
    let Some(own) = same(fd, c"", libc::AT_EMPTY_PATH) else { return ptr::null_mut() };
    let is_it = |(path, _): &&(&CStr, &[&CStr])| same(libc::AT_FDCWD, path, 0) == Some(own);
    let Some((path, names)) = ALSO.iter().find(is_it) else { return ptr::null_mut() };
    if path.to_bytes().starts_with(b"/sys") && is_mounted() {
        return ptr::null_mut();
    }
    let known = RESTS.iter().find(|rest| rest.stream.load(Ordering::Acquire) == stream);
    let claim = |rest: &&Rest| {
        let free = ptr::null_mut();
        rest.stream.compare_exchange(free, stream, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    let Some(rest) = known.or_else(|| RESTS.iter().find(claim)) else { return ptr::null_mut() };
    loop {
        let at = rest.next.fetch_add(1, Ordering::Relaxed);
        let Some(name) = names.get(at) else { return ptr::null_mut() };
        if same(fd, name, libc::AT_SYMLINK_NOFOLLOW).is_some() {
            continue;
        }
        let entry = rest.entry.get().cast::<dirent64>();
        let bytes = name.to_bytes_with_nul();
        // SAFETY: the entry is this stream's; the name is shorter than its room.
        unsafe {
            (*entry).d_ino = 1;
            (*entry).d_reclen = size_of::<dirent64>() as u16;
            (*entry).d_type = libc::DT_DIR;
            ptr::copy_nonoverlapping(
                bytes.as_ptr().cast(),
                (*entry).d_name.as_mut_ptr(),
                bytes.len(),
            );
        }
        return entry;
    }
}

/// A stream begins anew, or ends.
fn forget(stream: *mut DIR) {
    for rest in RESTS.iter().filter(|rest| rest.stream.load(Ordering::Acquire) == stream) {
        rest.next.store(0, Ordering::Relaxed);
        rest.stream.store(ptr::null_mut(), Ordering::Release);
    }
}

macro_rules! streams {
    ($($name:ident;)*) => {$(
        /// The function of libc, followed by the tree's additional entries at the end.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(stream: *mut DIR) -> *mut dirent64 {
            type Function = unsafe extern "C" fn(*mut DIR) -> *mut dirent64;
            let Some(next) = behind!($name: Function) else { return ptr::null_mut() };
            let before = crate::errno();
            set_errno(0);
            // SAFETY: the caller keeps to libc's rules.
            let mut entry = unsafe { next(stream) };
            if entry.is_null() && crate::errno() == 0 && !root().is_empty() {
                // SAFETY: as above.
                entry = unsafe { also(stream) };
                set_errno(before);
            } else if crate::errno() == 0 {
                set_errno(before);
            }
            entry
        }
    )*};
}

streams! {
    readdir;
    readdir64;
}

/// The function of libc.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn closedir(stream: *mut DIR) -> c_int {
    let Some(next) = behind!(closedir: unsafe extern "C" fn(*mut DIR) -> c_int) else {
        return c_int::FAILED;
    };
    forget(stream);
    // SAFETY: the caller keeps to libc's rules.
    unsafe { next(stream) }
}

/// The function of libc.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rewinddir(stream: *mut DIR) {
    forget(stream);
    if let Some(next) = behind!(rewinddir: unsafe extern "C" fn(*mut DIR)) {
        // SAFETY: the caller keeps to libc's rules.
        unsafe { next(stream) };
    }
}

/// The function of libc.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn seekdir(stream: *mut DIR, at: libc::c_long) {
    forget(stream);
    if let Some(next) = behind!(seekdir: unsafe extern "C" fn(*mut DIR, libc::c_long)) {
        // SAFETY: the caller keeps to libc's rules.
        unsafe { next(stream, at) };
    }
}
