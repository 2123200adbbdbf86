//! Tests of scans and watches of folders that change.

use std::{
    fs::Permissions,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use nix::unistd::setfsuid;

use super::*;

fn names(changes: &[FileChange]) -> Vec<(usize, String, bool)> {
    let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    changes.iter().map(|c| (c.layer, name(&c.path), c.state == FileState::Deleted)).collect()
}

#[test]
fn only_configuration_files_that_differ_are_reported() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let write = |path: PathBuf, text: &str| fs::write(path, text).unwrap();
    write(first.path().join("a.yaml"), "a");
    write(first.path().join(".a.yaml.swp"), "a");
    write(first.path().join(".hidden.yaml"), "a");
    write(first.path().join("notes.txt"), "a");
    fs::create_dir(first.path().join("sub")).unwrap();
    write(first.path().join("sub/b.json"), "b");
    write(second.path().join("a.yaml"), "c");
    let mut folders = Folders::new(&[first.path().into(), second.path().into()]).unwrap();
    let mut found = names(&folders.scan());
    found.sort();
    assert_eq!(
        found,
        [(0, "a.yaml".into(), false), (0, "b.json".into(), false), (1, "a.yaml".into(), false)]
    );
    assert_eq!(folders.scan(), []);

    write(second.path().join("new"), "d");
    fs::rename(second.path().join("new"), second.path().join("a.yaml")).unwrap();
    fs::remove_file(first.path().join("a.yaml")).unwrap();
    fs::write(first.path().join("sub/b.json"), [0xff]).unwrap();
    let changes = folders.scan();
    assert_eq!(names(&changes).len(), 3);
    assert!(changes.iter().any(|change| matches!(change.state, FileState::Unreadable(_))));

    fs::remove_dir_all(second.path()).unwrap();
    let changes = folders.scan();
    assert!(matches!(changes[..], [FileChange { state: FileState::Unreadable(_), .. }]), "{changes:?}");
    assert_eq!(folders.scan(), [], "a folder that vanished removes nothing");
    fs::create_dir(second.path()).unwrap();
    assert_eq!(folders.scan().len(), 2, "the error, and what stood in it");
}

#[test]
fn a_file_that_is_not_regular_is_reported_and_others_are_read() {
    let folder = tempfile::tempdir().unwrap();
    nix::unistd::mkfifo(&folder.path().join("a.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("b.yaml")).unwrap();
    fs::write(folder.path().join("c.yaml"), "c").unwrap();
    let mut folders = Folders::new(&[folder.path().into()]).unwrap();
    let mut changes = folders.scan();
    changes.sort_by(|one, other| one.path.cmp(&other.path));
    let reason = |change: &FileChange| match &change.state {
        FileState::Unreadable(reason) => reason.clone(),
        state => panic!("{state:?}"),
    };
    assert_eq!(reason(&changes[0]), "it is not a regular file");
    assert!(!reason(&changes[1]).is_empty());
    assert_eq!(changes[2].state, FileState::Text("c".into()));
    assert_eq!(folders.scan(), [], "they are named once");
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    fs::write(folder.path().join("a.yaml"), "a").unwrap();
    assert_eq!(folders.scan().len(), 1);
}

#[test]
fn a_file_that_is_too_large_is_reported_and_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = fs::File::create(folder.path().join("a.yaml")).unwrap();
    file.set_len(MAX_FILE).unwrap();
    let mut folders = Folders::new(&[folder.path().into()]).unwrap();
    assert!(matches!(&folders.scan()[..], [FileChange { state: FileState::Text(_), .. }]));
    file.set_len(MAX_FILE + 1).unwrap();
    let changes = folders.scan();
    let [FileChange { state: FileState::Unreadable(reason), .. }] = &changes[..] else {
        panic!("{changes:?}");
    };
    assert_eq!(reason, "it is larger than 32 MiB: split it");
}

#[test]
fn a_single_file_may_be_followed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.yaml");
    assert!(Folders::new(std::slice::from_ref(&file)).is_err());
    fs::write(&file, "a").unwrap();
    fs::write(folder.path().join("b.yaml"), "b").unwrap();
    let mut folders = Folders::new(std::slice::from_ref(&file)).unwrap();
    assert_eq!(names(&folders.scan()), [(0, "a.yaml".into(), false)]);
    fs::rename(folder.path().join("b.yaml"), &file).unwrap();
    assert_eq!(names(&folders.scan()), [(0, "a.yaml".into(), false)]);
    fs::remove_file(&file).unwrap();
    let changes = folders.scan();
    assert!(matches!(changes[..], [FileChange { state: FileState::Unreadable(_), .. }]), "{changes:?}");
    assert_eq!(folders.scan(), [], "a file that vanished removes nothing");
}

/// Until this is dropped, the current thread has the file permissions of an ordinary user.
struct Ordinary;

impl Ordinary {
    fn new() -> Self {
        setfsuid(65_534.into());
        Self
    }
}

impl Drop for Ordinary {
    fn drop(&mut self) {
        setfsuid(nix::unistd::geteuid());
    }
}

#[test]
fn an_unreadable_folder_keeps_its_files_and_others_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let allow = |name: &str, mode| fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
    fs::create_dir_all(at("a/deep/er")).unwrap();
    for name in ["a.yaml", "a/1.yaml", "a/deep/er/2.yaml", "ab.yaml"] {
        fs::write(at(name), name).unwrap();
    }
    allow("", 0o755);
    let mut folders = Folders::new(&[folder.path().into()]).unwrap();
    assert_eq!(folders.scan().len(), 4);
    // Modes: a folder that cannot be listed, and one that can be listed but whose entries cannot be read.
    for mode in [0o000, 0o444] {
        allow("a", mode);
        let ordinary = Ordinary::new();
        let changes = folders.scan();
        let named: Vec<_> = changes.iter().map(|change| (&*change.path, &change.state)).collect();
        assert!(!named.is_empty());
        for (path, state) in named {
            assert!(path.starts_with(at("a").to_str().unwrap()), "{path}");
            assert!(matches!(state, FileState::Unreadable(reason) if reason.contains("ermission denied")));
        }
        assert_eq!(folders.scan(), [], "it is named once");
        let refused = Folders::new(&[folder.path().into()]).err().unwrap().to_string();
        assert!(refused.contains(at("a").to_str().unwrap()), "{refused}");
        drop(ordinary);
        fs::write(at("ab.yaml"), mode.to_string()).unwrap();
        let ordinary = Ordinary::new();
        assert_eq!(names(&folders.scan()), [(0, "ab.yaml".into(), false)]);
        drop(ordinary);
        allow("a", 0o755);
        let changes = folders.scan();
        assert!(changes.iter().all(|change| !matches!(change.state, FileState::Unreadable(_))));
        let is_gone = |change: &&FileChange| change.state == FileState::Deleted;
        assert!(changes.iter().filter(is_gone).all(|change| !change.path.ends_with(".yaml")));
    }
    // A single file may hold a policy as well.
    allow("a.yaml", 0o000);
    {
        let _ordinary = Ordinary::new();
        let refused = Folders::new(&[folder.path().into()]).err().unwrap().to_string();
        assert!(refused.contains(at("a.yaml").to_str().unwrap()), "{refused}");
    }
    allow("a.yaml", 0o644);
    allow("a", 0o000);
    {
        let _ordinary = Ordinary::new();
        assert_eq!(folders.scan().len(), 1);
    }
    allow("a", 0o755);
    fs::remove_dir_all(at("a")).unwrap();
    let mut removed = names(&folders.scan());
    removed.sort();
    assert_eq!(removed, ["1.yaml", "2.yaml", "a"].map(|name| (0, name.into(), true)));
}

#[test]
fn each_folder_is_read_once_despite_links() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("real")).unwrap();
    fs::write(at("real/1.yaml"), "1").unwrap();
    fs::write(other.path().join("2.yaml"), "2").unwrap();
    // Links that form cycles, links to nothing, and 40 folders with two links each to the next one.
    for name in ["a", "b", "real/c"] {
        symlink(folder.path(), at(name)).unwrap();
    }
    for depth in 0..40 {
        let next = other.path().join(format!("{}", depth + 1));
        fs::create_dir(&next).unwrap();
        let from = if depth == 0 { other.path().to_owned() } else { other.path().join(depth.to_string()) };
        for name in ["x", "y"] {
            symlink(&next, from.join(name)).unwrap();
        }
    }
    symlink(other.path(), at("e")).unwrap();
    symlink(other.path(), at("d")).unwrap();
    symlink("nowhere", at("f")).unwrap();
    symlink("g", at("g")).unwrap();
    let mut folders =
        Folders { folders: vec![folder.path().into()], seen: FileStates::new(), walked: FolderIds::new() };
    let mut changes = folders.scan();
    changes.sort_by(|one, other| one.path.cmp(&other.path));
    let paths: Vec<_> = changes.iter().map(|change| Path::new(&change.path).to_owned()).collect();
    assert_eq!(paths, ["d/2.yaml", "f", "g", "real/1.yaml"].map(at));
    for nowhere in &changes[1..3] {
        assert!(matches!(nowhere.state, FileState::Unreadable(_)));
    }
    assert_eq!(folders.walked.len(), 3 + 40);
}

#[test]
fn files_behind_a_broken_link_stay_until_the_link_is_removed() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(other.path().join("policies")).unwrap();
    for name in ["policies/1.yaml", "2.yaml"] {
        fs::write(other.path().join(name), name).unwrap();
    }
    symlink(other.path().join("policies"), at("policies")).unwrap();
    symlink(other.path().join("2.yaml"), at("2.yaml")).unwrap();
    let mut folders = Folders::new(&[folder.path().into()]).unwrap();
    assert_eq!(folders.scan().len(), 2);
    drop(other);
    let mut changes = folders.scan();
    changes.sort_by(|one, other| one.path.cmp(&other.path));
    for (change, name) in changes.iter().zip(["2.yaml", "policies"]) {
        assert_eq!(Path::new(&change.path), at(name));
        assert_eq!(
            change.state,
            FileState::Unreadable("a symbolic link whose target does not exist".to_owned())
        );
    }
    assert_eq!(changes.len(), 2);
    assert_eq!(folders.scan(), []);
    for name in ["policies", "2.yaml"] {
        fs::remove_file(at(name)).unwrap();
    }
    let mut removed = names(&folders.scan());
    removed.sort();
    assert_eq!(removed, ["1.yaml", "2.yaml", "policies"].map(|name| (0, name.into(), true)));
}

#[test]
fn the_folder_of_the_target_of_a_link_is_watched() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(other.path().join("1.yaml"), "1").unwrap();
    symlink(other.path().join("1.yaml"), folder.path().join("1.yaml")).unwrap();
    let mut folders = Folders::new(&[folder.path().into()]).unwrap();
    assert_eq!(folders.scan().len(), 1);
    let watched: Vec<_> = folders.walked.keys().cloned().collect();
    let mut expected = [folder.path(), other.path()].map(|path| fs::canonicalize(path).unwrap());
    expected.sort();
    assert_eq!(watched, expected);
    fs::write(other.path().join("1.yaml"), "2").unwrap();
    assert_eq!(folders.scan()[0].state, FileState::Text("2".to_owned()));
}

#[tokio::test]
async fn new_and_recreated_folders_are_watched() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("a")).unwrap();
    symlink("loop", at("loop")).unwrap();
    let mut folders =
        Folders { folders: vec![folder.path().into()], seen: FileStates::new(), walked: FolderIds::new() };
    let (sender, mut events) = mpsc::unbounded_channel();
    let mut watch = Watch { events: sender, watcher: None, folders: FolderIds::new(), is_complete: false };
    for round in 0..3 {
        if round == 1 {
            fs::create_dir_all(at("b/c")).unwrap();
        }
        if round == 2 {
            fs::remove_dir_all(at("b")).unwrap();
            while watch.is_complete {
                watch.is_complete = settle(&mut events, &watch.folders, SCAN_INTERVAL).await;
            }
            fs::create_dir_all(at("b/c")).unwrap();
        }
        folders.scan();
        watch.follow(&folders.walked);
        assert!(watch.is_complete);
        for name in if round == 0 { &["", "a"][..] } else { &["", "a", "b/c"] } {
            let file = at(name).join(format!("{round}.yaml"));
            fs::write(&file, "").unwrap();
            while !matches!(events.recv().await, Some(Ok(event)) if event.paths.contains(&file)) {}
        }
    }
}

#[tokio::test]
async fn a_scan_does_not_cause_a_scan() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.yaml"), "a").unwrap();
    let (sender, mut events) = mpsc::unbounded_channel();
    let mut watcher = notify::recommended_watcher(move |event| {
        let _ = sender.send(event);
    })
    .unwrap();
    watcher.watch(folder.path(), RecursiveMode::Recursive).unwrap();
    Folders::new(&[folder.path().into()]).unwrap().scan();
    // The removal marks the end of the events that the reads cause.
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    loop {
        let event = events.recv().await.unwrap();
        if matches!(&event, Ok(event) if event.kind.is_remove()) {
            break;
        }
        assert!(is_reading(&event), "{event:?}");
    }
}

#[tokio::test]
async fn a_change_is_reported_once_the_writer_closes_the_file() {
    use std::io::Write as _;
    let folder = tempfile::tempdir().unwrap();
    let mut folders = Folders::new(&[folder.path().into()]).unwrap();
    folders.scan();
    let (sender, mut seen) = mpsc::unbounded_channel();
    let watching = tokio::spawn(folders.watch(move |changes| {
        let _ = sender.send(changes);
    }));
    // The watch is active once a change is seen; a change made too early may cause no event.
    let path = folder.path().join("a.yaml");
    let mut number = 0;
    let text = loop {
        number += 1;
        fs::write(&path, format!("number {number}")).unwrap();
        if let Ok(Some(changes)) = tokio::time::timeout(Duration::from_millis(50), seen.recv()).await {
            break changes;
        }
    };
    assert_eq!(text.len(), 1);

    let mut file = fs::File::create(&path).unwrap();
    file.write_all(b"first half, ").unwrap();
    file.flush().unwrap();
    tokio::task::yield_now().await;
    file.write_all(b"second half").unwrap();
    drop(file);
    loop {
        let changes = seen.recv().await.unwrap();
        let FileState::Text(text) = &changes[0].state else { panic!("{changes:?}") };
        assert!(text.starts_with("number") || text == "first half, second half", "{text}");
        if text.ends_with("half") {
            break;
        }
    }
    watching.abort();
}
