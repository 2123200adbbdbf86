use std::{
    os::unix::{fs::PermissionsExt, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, User, chown},
};

use super::*;

/// A server of PostgreSQL with a socket in a temporary folder; ended when dropped.
pub(crate) struct Postgres {
    server: Child,
    folder: tempfile::TempDir,
}

impl Postgres {
    /// Starts the newest installed server. Returns `None`, with a message, if there is none.
    pub(crate) fn start() -> Option<Self> {
        let Some(programs) = installed() else {
            eprintln!("skipped: PostgreSQL is not installed in /usr/lib/postgresql");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        let run = |program: &str| {
            let mut command = Command::new(programs.join(program));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).current_dir("/");
            // The server refuses to run as root.
            if nix::unistd::geteuid().is_root() {
                let user =
                    ["postgres", "nobody"].iter().find_map(|name| User::from_name(name).unwrap()).unwrap();
                chown(folder.path(), Some(user.uid), Some(user.gid)).unwrap();
                command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
            }
            command
        };
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let mut initdb = run("initdb");
        initdb.args(["--username", "airline", "--auth", "trust", "--no-sync", "--pgdata"]).arg(&data);
        let made = initdb.output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut server = run("postgres");
        server
            .args(["-c", "listen_addresses=", "-c", "fsync=off", "-k"])
            .arg(folder.path())
            .arg("-D")
            .arg(&data);
        let server = server.stderr(Stdio::null()).spawn().unwrap();
        Some(Self { server, folder })
    }

    /// Returns the setting of the database, once the server accepts connections.
    pub(crate) async fn setting(&self) -> DatabaseSetting {
        let url = format!("postgresql://airline@/postgres?host={}", self.folder.path().display());
        let setting: DatabaseSetting = url.parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match Store::open(&setting, "ready").await {
                Ok(_) => return setting,
                Err(error) => assert!(Instant::now() < deadline, "{error:#}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Immediate shutdown: it also ends the server's children.
        let _ = kill(Pid::from_raw(self.server.id().cast_signed()), Signal::SIGQUIT);
        let _ = self.server.wait();
    }
}

/// Returns the folder of the newest installed programs.
fn installed() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let number = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let newest = versions.map(|entry| entry.path()).max_by_key(|path| number(path))?;
    Some(newest.join("bin")).filter(|programs| programs.join("initdb").exists())
}

/// Checks every operation on an empty store.
async fn check(store: &Store) {
    let put = async |id: &str, number: u32| store.put(id, &number).await.unwrap();
    for (id, number) in [("a/1", 1), ("a/2", 2), ("b/1", 3), ("a", 4), ("a0", 5)] {
        put(id, number).await;
    }
    assert_eq!(store.get::<u32>("a/2").await.unwrap(), Some(2));
    assert_eq!(store.get::<u32>("c").await.unwrap(), None);
    assert_eq!(store.starting_with::<u32>("a/").await.unwrap(), [1, 2]);
    put("a/2", 7).await;
    assert_eq!(store.remove::<u32>("a/2").await.unwrap(), Some(7));
    assert_eq!(store.remove::<u32>("a/2").await.unwrap(), None);
    assert_eq!(store.count().await.unwrap(), 4);

    let increment = || {
        store.update("b/1", |number: &mut u32| {
            *number += 1;
            Ok(*number)
        })
    };
    let (first, second) = tokio::join!(increment(), increment());
    let mut results = [first.unwrap(), second.unwrap()];
    results.sort_unstable();
    assert_eq!(results, [Some(4), Some(5)], "no change is lost");
    assert_eq!(store.update("c", |_: &mut u32| Ok(())).await.unwrap(), None);

    store.load(vec![("x".to_owned(), 1), ("y".to_owned(), 2)]).await.unwrap();
    assert_eq!((store.count().await.unwrap(), store.get::<u32>("a").await.unwrap()), (2, None));
}

#[tokio::test]
async fn an_embedded_database_keeps_documents_in_its_file() {
    check(&Store::open(&DatabaseSetting::Temporary, "x").await.unwrap()).await;
    let folder = tempfile::tempdir().unwrap();
    let setting: DatabaseSetting = folder.path().join("x.redb").to_str().unwrap().parse().unwrap();
    let store = Store::open(&setting, "x").await.unwrap();
    store.put("a", &1).await.unwrap();
    assert!(Store::open(&setting, "x").await.is_err(), "another process uses the file");
    drop(store);
    // A flush may still hold the database.
    let deadline = Instant::now() + Duration::from_secs(60);
    let store = loop {
        match Store::open(&setting, "x").await {
            Ok(store) => break store,
            Err(error) => assert!(Instant::now() < deadline, "{error:#}"),
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(store.get::<u32>("a").await.unwrap(), Some(1));
}

#[tokio::test]
async fn postgresql_keeps_documents_and_is_connected_again() {
    let Some(server) = Postgres::start() else { return };
    let setting = server.setting().await;
    let store = Store::open(&setting, "documents").await.unwrap();
    check(&store).await;
    let DatabaseSetting::Postgres(config) = setting else { panic!("another setting") };
    let (other, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid() AND datname = 'postgres'";
    other.batch_execute(end).await.unwrap();
    // Operations fail until the client has seen the end of the connection: the message of it, and then that of its socket.
    let deadline = Instant::now() + Duration::from_secs(60);
    let again = loop {
        match store.get::<u32>("x").await {
            Ok(found) => break found,
            Err(error) => assert!(Instant::now() < deadline, "{error:?}"),
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(again, Some(1));
}

#[test]
fn settings_are_files_or_urls() {
    let parsed = |text: &str| text.parse::<DatabaseSetting>().map(|setting| format!("{setting:?}"));
    assert_eq!(parsed("temporary"), Ok("Temporary".to_owned()));
    assert_eq!(parsed("/data/x.redb"), Ok("File".to_owned()));
    assert_eq!(parsed("postgresql://me:secret@db/x"), Ok("Postgres".to_owned()));
    let refused = parsed("postgresql://me:secret@db:port/x").unwrap_err();
    assert!(!refused.contains("secret"), "{refused}");
    assert!(parsed("").is_err());
}
