use std::{fs, ops::Deref, os::unix::fs::PermissionsExt as _, path::Path};

use super::{folder::Folder, *};

const ROOTS: &str = "root-cert.pem";
const HOUR: Duration = Duration::from_secs(3600);
const LIFETIMES: Lifetimes = Lifetimes { certificate: HOUR, root: Duration::from_secs(1000 * 3600) };

/// An authority in a directory, which has each of its states.
struct Stored {
    folder: Folder,
    authority: SelfSigned,
}

impl Deref for Stored {
    type Target = SelfSigned;

    fn deref(&self) -> &SelfSigned {
        &self.authority
    }
}

impl Stored {
    fn rotate(&mut self, now: SystemTime) -> Result<bool, Error> {
        self.store(self.rotated(now)?)
    }

    fn advance(&mut self, now: SystemTime) -> Result<bool, Error> {
        self.store(self.advanced(now)?)
    }

    fn store(&mut self, next: Option<SelfSigned>) -> Result<bool, Error> {
        let is_new = next.is_some();
        if let Some(next) = next {
            self.folder.replace(&next)?;
            self.authority = next;
        }
        self.folder.write_roots(&self.authority)?;
        Ok(is_new)
    }
}

fn open(path: &Path, lifetimes: Lifetimes, now: SystemTime) -> Result<Stored, Error> {
    let folder = Folder::open(path)?;
    let authority = folder.load(lifetimes, now)?;
    Ok(Stored { folder, authority })
}

/// Returns the number of roots in the bundle, equal for the authority and the file, and the name of the signing
/// root.
fn trusted(authority: &SelfSigned, folder: &Path) -> (usize, String) {
    let roots = authority.authority().unwrap().roots_pem().to_owned();
    let file = fs::read_to_string(folder.join(ROOTS)).unwrap();
    assert_eq!(certificates(roots.as_bytes(), "").unwrap(), certificates(file.as_bytes(), "").unwrap());
    (
        certificates(roots.as_bytes(), "").unwrap().len(),
        authority.authority().unwrap().described()[0].serial.clone(),
    )
}

#[test]
fn a_rotation_continues_after_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let mut now = SystemTime::now();
    let mut authority = open(path, LIFETIMES, now).unwrap();
    let mode = |name| fs::metadata(path.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(STATE), mode(ROOTS)), (0o600, 0o644));
    let (count, old) = trusted(&authority, path);
    assert_eq!(count, 1);
    assert!(!authority.advance(now + HOUR).unwrap(), "nothing is due");

    assert!(authority.rotate(now).unwrap());
    assert!(!authority.rotate(now).unwrap(), "one at a time");
    let mut signers = vec![old.clone()];
    for (step, count) in [(Step::Distribute, 2), (Step::Issue, 2), (Step::Retire, 1), (Step::Settled, 1)] {
        // A process that ends and starts again continues, here even after the loss of `root-cert.pem`.
        drop(authority);
        fs::remove_file(path.join(ROOTS)).unwrap();
        authority = open(path, LIFETIMES, now).unwrap();
        assert_eq!(authority.step(), step);
        let (trusts, signs) = trusted(&authority, path);
        assert_eq!(trusts, count, "{step:?}");
        signers.push(signs);
        assert!(!authority.advance(now + HOUR).unwrap(), "{step:?} lasts for longer than a certificate");
        now += 2 * HOUR;
        assert_eq!(authority.advance(now).unwrap(), step != Step::Settled, "{step:?}");
    }
    let new = signers[3].clone();
    assert_eq!(signers, [old.clone(), old.clone(), new.clone(), new.clone(), new.clone()]);
    assert_ne!(old, new);
}

#[test]
fn a_root_is_replaced_before_it_expires() {
    let now = SystemTime::now();
    let authority = SelfSigned::create(LIFETIMES, now).unwrap();
    assert!(authority.until() > now + 700 * HOUR && authority.until() < now + 900 * HOUR);
    assert_eq!(authority.advanced(now + 900 * HOUR).unwrap().unwrap().step(), Step::Distribute);

    let short = Lifetimes { root: 9 * HOUR, ..LIFETIMES };
    let refused = SelfSigned::create(short, now).err().unwrap().to_string();
    assert!(refused.contains("at least 10 times"), "{refused}");
}

#[test]
fn a_root_that_has_expired_by_the_clock_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let mut authority = open(folder.path(), LIFETIMES, now).unwrap();
    let text = || fs::read_to_string(folder.path().join(STATE)).unwrap();
    let before = text();
    // A running process whose clock is set forward, and one that starts afterwards.
    for refused in [authority.advance(now + 2000 * HOUR).err(), authority.rotate(now + 2000 * HOUR).err()] {
        let message = refused.unwrap().to_string();
        assert!(
            message.contains("its root has expired") && message.contains("If the clock is wrong"),
            "{message}"
        );
    }
    drop(authority);
    let message = open(folder.path(), LIFETIMES, now + 2000 * HOUR).err().unwrap().to_string();
    assert!(message.contains("its root has expired"), "{message}");
    assert_eq!(text(), before);
    open(folder.path(), LIFETIMES, now + HOUR).unwrap();
    assert_eq!(text(), before);
}

#[test]
fn a_start_needs_no_write_permission() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    drop(open(folder.path(), LIFETIMES, now).unwrap());
    let changed =
        || [STATE, ROOTS].map(|name| fs::metadata(folder.path().join(name)).unwrap().modified().unwrap());
    let before = changed();
    let inode = |name| std::os::unix::fs::MetadataExt::ino(&fs::metadata(folder.path().join(name)).unwrap());
    let files = [STATE, ROOTS].map(inode);
    drop(open(folder.path(), LIFETIMES, now + HOUR).unwrap());
    assert_eq!((changed(), [STATE, ROOTS].map(inode)), (before, files), "nothing was written");
}

#[test]
fn a_directory_is_used_by_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let first = open(folder.path(), LIFETIMES, now).unwrap();
    let message = open(folder.path(), LIFETIMES, now).err().unwrap().to_string();
    assert!(message.contains("another process uses the folder"), "{message}");
    drop(first);
    open(folder.path(), LIFETIMES, now).unwrap();
}

#[test]
fn certificates_with_a_longer_former_lifetime_delay_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    open(folder.path(), LIFETIMES, now).unwrap();
    let short = Lifetimes { certificate: Duration::from_secs(60), ..LIFETIMES };
    let mut authority = open(folder.path(), short, now).unwrap();
    authority.rotate(now).unwrap();
    assert!(authority.until() > now + HOUR, "certificates of an hour may be alive");
    let later = authority.until();
    assert!(authority.advance(later).unwrap());
    assert!(authority.until() < later + HOUR / 10, "they are not now");
}

#[test]
fn a_root_for_shorter_lifetimes_is_replaced_before_it_expires() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let short = Lifetimes { certificate: Duration::from_secs(60), root: HOUR };
    open(folder.path(), short, now).unwrap();
    // From now on certificates live longer than the old root.
    let long = Lifetimes { certificate: 24 * HOUR, ..LIFETIMES };
    let mut authority = open(folder.path(), long, now).unwrap();
    assert!(authority.rotate(now).unwrap());
    assert!(authority.until() < now + HOUR, "no certificate could be signed when the step ends");
    // All certificates of the old root are renewed after 70 % of its remaining lifetime.
    assert!(authority.until() > now + HOUR * 7 / 10);
    let due = authority.until();
    assert!(authority.advance(due).unwrap());
    assert_eq!(authority.step(), Step::Issue);
    assert!(authority.until() > due + 24 * HOUR);
}

#[test]
fn the_root_file_is_restored_and_a_plugged_in_authoritys_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    let roots = folder.path().join(ROOTS);
    let mut authority = open(folder.path(), LIFETIMES, now).unwrap();
    let before = fs::read_to_string(&roots).unwrap();
    fs::remove_file(&roots).unwrap();
    assert!(!authority.advance(now).unwrap());
    assert_eq!(fs::read_to_string(&roots).unwrap(), before);

    fs::write(folder.path().join("ca-key.pem"), "").unwrap();
    fs::write(&roots, "another's").unwrap();
    assert!(authority.rotate(now).unwrap());
    assert_eq!(fs::read_to_string(&roots).unwrap(), "another's");
}

#[test]
fn an_incomplete_state_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now();
    open(folder.path(), LIFETIMES, now).unwrap();
    let state = folder.path().join(STATE);
    let text = fs::read_to_string(&state).unwrap();
    fs::write(&state, &text[..text.len() / 2]).unwrap();
    let message = open(folder.path(), LIFETIMES, now).err().unwrap().to_string();
    assert!(message.contains("authority.json: it cannot be read"), "{message}");
    fs::remove_file(&state).unwrap();
    let message = open(folder.path(), LIFETIMES, now).err().unwrap().to_string();
    assert!(message.contains("authority.json: it is missing"), "{message}");
}
