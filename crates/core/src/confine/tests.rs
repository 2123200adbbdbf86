use std::{
    fs, io::Write as _, net::TcpListener, os::unix::process::CommandExt as _, process::Command, thread,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, unshare},
    sys::{
        mman::{MapFlags, ProtFlags, mmap_anonymous},
        socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket},
    },
    unistd::{Pid, setpgid},
};

use super::*;

/// Runs `body` on its own thread, since a filter stays for the lifetime of a thread.
fn confined<T: Send>(children: Children, body: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            process(children).unwrap();
            body()
        });
        thread.join().unwrap()
    })
}

fn mapped(protection: ProtFlags) -> Result<(), Errno> {
    let length = std::num::NonZero::new(4096).unwrap();
    // SAFETY: a new anonymous mapping, at an address that the kernel chooses, overlaps no memory in use. It stays
    // mapped until the process exits.
    #[expect(unsafe_code, reason = "mmap has no safe form; the proof is above")]
    let mapped = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) };
    mapped.map(drop)
}

#[test]
fn calls_that_the_programs_need_are_allowed() {
    confined(Children::None, || {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        fs::File::create(&file).unwrap().write_all(b"text").unwrap();
        fs::rename(&file, folder.path().join("b")).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = thread::Builder::new().name("client".into()).spawn(move || {
            std::net::TcpStream::connect(address).unwrap().write_all(b"x").unwrap();
        });
        listener.accept().unwrap();
        client.unwrap().join().unwrap();
        assert!(std::net::ToSocketAddrs::to_socket_addrs("localhost:80").unwrap().next().is_some());
        for family in [AddressFamily::Unix, AddressFamily::Inet, AddressFamily::Inet6] {
            for kind in [SockType::Stream, SockType::Datagram] {
                for flags in [SockFlag::empty(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK] {
                    // The machine may lack IPv6.
                    let made = socket(family, kind, flags, None).map(drop);
                    assert!(
                        matches!(made, Ok(()) | Err(Errno::EAFNOSUPPORT)),
                        "{family:?} {kind:?}: {made:?}"
                    );
                }
            }
        }
        assert_eq!(mapped(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE), Ok(()));
        assert_eq!(mapped(ProtFlags::PROT_READ | ProtFlags::PROT_EXEC), Ok(()));
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert!(status.contains("NoNewPrivs:\t1\n") && status.contains("Seccomp:\t2\n"), "{status}");
    });
}

#[test]
fn other_calls_are_refused() {
    confined(Children::None, || {
        assert_eq!(mapped(ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC), Err(Errno::ENOSYS));
        assert_eq!(unshare(CloneFlags::CLONE_NEWUSER), Err(Errno::ENOSYS));
        for family in [AddressFamily::Packet, AddressFamily::Inet, AddressFamily::Inet6, AddressFamily::Unix]
        {
            for flags in [SockFlag::empty(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK] {
                // With IPPROTO_RAW the caller writes the IP header.
                let raw = socket(family, SockType::Raw, flags, SockProtocol::Raw);
                assert_eq!(raw.map(drop), Err(Errno::ENOSYS), "{family:?}, {flags:?}");
            }
        }
        let packets = socket(AddressFamily::Inet, SockType::SeqPacket, SockFlag::empty(), None);
        assert_eq!(packets.map(drop), Err(Errno::ENOSYS));
        assert_eq!(nix::sys::ptrace::traceme(), Err(Errno::ENOSYS));
        assert_eq!(
            nix::sys::memfd::memfd_create(c"a", nix::sys::memfd::MFdFlags::empty()).map(drop),
            Err(Errno::ENOSYS)
        );
        let started = Command::new("true").status().unwrap_err();
        assert_eq!(started.raw_os_error(), Some(libc::ENOSYS));
    });
}

#[test]
fn child_processes_may_be_started_and_are_confined_too() {
    let seen = confined(Children::Programs, || {
        // The probe of a machine runs its command in a process group of its own.
        assert_eq!(setpgid(Pid::from_raw(0), Pid::from_raw(1)), Err(Errno::ENOSYS));
        let mut command = Command::new("grep");
        command.args(["-E", "^(NoNewPrivs|Seccomp):", "/proc/self/status"]).process_group(0).output().unwrap()
    });
    assert_eq!(String::from_utf8(seen.stdout).unwrap(), "NoNewPrivs:\t1\nSeccomp:\t2\n");
}
