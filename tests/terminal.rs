//! `skysail up` on a terminal: the table fits, is redrawn in place and is removed at the end.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    fs::File,
    io::Read as _,
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use nix::{
    pty::{Winsize, openpty},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::termios::{Winsize as Size, tcsetwinsize};
use skysail_testkit::{Terminal, eventually};
use tempfile::TempDir;

/// A mesh on a terminal, which ends with its test.
struct OnTerminal {
    child: Child,
    keyboard: OwnedFd,
    shown: Arc<Mutex<Shown>>,
    reader: Option<thread::JoinHandle<()>>,
    _folder: TempDir,
}

struct Shown {
    terminal: Terminal,
    draws: usize,
}

impl OnTerminal {
    /// Runs the airline on a terminal of this size.
    fn start(columns: u16, rows: u16) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        let airline = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/airline");
        let child = Command::new(env!("CARGO_BIN_EXE_skysail"))
            .args(["up", "--name", "airline"])
            .arg(airline)
            .env("XDG_RUNTIME_DIR", folder.path())
            .env("TERM", "xterm")
            // These variables apply without a terminal only.
            .env("COLUMNS", "7")
            .env("LINES", "3")
            .stdin(Stdio::null())
            .stdout(pty.slave.try_clone().unwrap())
            .stderr(pty.slave)
            .spawn()
            .unwrap();
        let terminal = Terminal::new(columns.into(), rows.into());
        let shown = Arc::new(Mutex::new(Shown { terminal, draws: 0 }));
        let (mut from, to) = (File::from(pty.master.try_clone().unwrap()), Arc::clone(&shown));
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            // It fails when the last program on the terminal has ended.
            while let Ok(length @ 1..) = from.read(&mut buffer) {
                let mut to = to.lock().unwrap();
                to.draws += buffer[..length].windows(4).filter(|text| text == b"FROM").count();
                to.terminal.write(&buffer[..length]);
            }
        });
        Self { child, keyboard: pty.master, shown, reader: Some(reader), _folder: folder }
    }

    /// Waits until the table has been drawn several times and the screen shows this.
    fn wait(&self, what: &str, shows: impl Fn(&str) -> bool) -> String {
        let before = self.shown.lock().unwrap().draws;
        eventually(what, || {
            let shown = self.shown.lock().unwrap();
            let screen = shown.terminal.screen();
            if shown.draws >= before + 3 && shows(&screen) { Ok(screen) } else { Err(screen) }
        })
    }

    fn resize(&self, columns: u16, rows: u16) {
        let mut shown = self.shown.lock().unwrap();
        let size = Size { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.keyboard, size).unwrap();
        shown.terminal.resize(columns.into(), rows.into());
    }

    /// Ends the mesh and returns all output to the terminal.
    fn end(mut self) -> String {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
        self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        let shown = self.shown.lock().unwrap();
        format!("{}{}", shown.terminal.scrolled(), shown.terminal.screen())
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_table_fits_a_terminal_of_80_columns_and_is_redrawn_in_place() {
    let mesh = OnTerminal::start(80, 24);
    let screen = mesh.wait("the whole table is shown", |screen| {
        screen.matches("FROM").count() == 1
            && screen.contains("  airline/flight-v2 ")
            && screen.contains("MTLS")
    });
    assert!(screen.contains("workloads are ready"), "progress stays on the screen:\n{screen}");
    let all = mesh.end();
    // The last table stays; every other one was cleared.
    assert_eq!(all.matches("FROM").count(), 1, "{all}");
    assert_eq!(all.matches("workloads are ready").count(), 1, "{all}");
    assert_eq!(all.matches("mesh airline from").count(), 1, "{all}");
    assert!(all.trim_end().ends_with("healthy"), "the result is the last line:\n{all}");
}

#[test]
fn a_small_terminal_shows_the_busiest_edges_and_counts_the_others() {
    let mesh = OnTerminal::start(40, 10);
    let is_small =
        |screen: &str| screen.matches("FROM").count() == 1 && screen.contains("more edges: enlarge");
    let screen = mesh.wait("a part of the table is shown", is_small);
    assert!(screen.contains("SUCCESS") && !screen.contains("MTLS"), "{screen}");
    mesh.resize(100, 40);
    mesh.wait("all of it is shown once there is room", |screen| {
        screen.matches("FROM").count() == 1 && screen.contains("MTLS") && !screen.contains("more edges")
    });
    mesh.resize(40, 10);
    mesh.wait("a part of it is shown again", is_small);
    let all = mesh.end();
    assert_eq!(all.matches("FROM").count(), 1, "{all}");
    assert!(all.trim_end().ends_with("healthy"), "the result is the last line:\n{all}");
}
