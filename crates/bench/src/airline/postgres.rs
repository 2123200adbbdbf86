//! A PostgreSQL server for the services, outside of the mesh. They connect to its socket in a temporary folder, so the
//! sidecars do not see these connections.

use std::{
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use nix::unistd::{User, chown, geteuid};
use tokio::process::Command;

use crate::{
    accounting,
    child::{Running, Scheduling},
};

/// Folder of the installed versions.
const INSTALLED: &str = "/usr/lib/postgresql";
/// Timeout for the server to accept connections.
const READY: Duration = Duration::from_secs(60);

/// The server; ended when dropped.
pub(super) struct PostgresServer {
    server: Running,
    folder: tempfile::TempDir,
}

impl PostgresServer {
    /// Creates the files of a server and starts it, as the user `postgres` or `nobody` if this user is root.
    ///
    /// # Errors
    /// PostgreSQL is not installed, or does not start.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let programs = installed().with_context(|| {
            format!("PostgreSQL is not installed in {INSTALLED}: install it, or set the database to embedded")
        })?;
        let folder = tempfile::Builder::new().prefix("skysail-bench-").tempdir()?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let files = folder.path().join("files");
        fs::create_dir(&files)?;
        let mut start: Vec<OsString> = Vec::new();
        if geteuid().is_root() {
            let found =
                ["postgres", "nobody"].into_iter().find_map(|name| User::from_name(name).ok().flatten());
            let user =
                found.context("PostgreSQL does not run as root, and there is no user postgres or nobody")?;
            chown(&files, Some(user.uid), Some(user.gid))?;
            start.extend(
                ["setpriv", "--reuid", &user.uid.to_string(), "--regid", &user.gid.to_string()]
                    .map(Into::into),
            );
            start.extend(["--clear-groups".into(), "--".into()]);
        }
        let data = files.join("data");
        let mut initdb = start.clone();
        initdb.push(programs.join("initdb").into());
        initdb.extend(["--username", "airline", "--auth", "trust", "--pgdata"].map(Into::into));
        initdb.push(data.clone().into());
        let made = Command::new(&initdb[0])
            .args(&initdb[1..])
            .stdin(Stdio::null())
            .current_dir("/")
            .output()
            .await?;
        ensure!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr).trim());
        start.push(programs.join("postgres").into());
        start.extend(
            ["-c", "listen_addresses=", "-c", "synchronous_commit=off", "-c", "autovacuum=off", "-k"]
                .map(Into::into),
        );
        start.extend([files.clone().into(), "-D".into(), data.into()]);
        let scheduling = Scheduling::default();
        let mut server = Running::start("postgres", &start, folder.path(), scheduling)?;
        server.printed("ready to accept connections", READY).await?;
        Ok(Self { server, folder })
    }

    /// Returns the URL of its database.
    pub(super) fn url(&self) -> String {
        let files = self.folder.path().join("files");
        format!("postgresql://airline@/postgres?host={}", files.display())
    }

    /// Returns its processes.
    pub(super) fn processes(&self) -> Vec<i32> {
        accounting::family(self.server.pid())
    }

    /// Ends the server.
    pub(super) async fn stop(self) {
        self.server.stop().await;
    }
}

/// Returns the folder of the newest installed programs.
fn installed() -> Option<PathBuf> {
    let number = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let versions = fs::read_dir(INSTALLED).ok()?.flatten().map(|entry| entry.path());
    let newest = versions.max_by_key(|path| number(path))?.join("bin");
    newest.join("initdb").exists().then_some(newest)
}
