use std::{
    io::Read as _,
    time::{Duration, SystemTime},
};

use super::*;

/// Returns an image of this test.
fn image(folder: &Path) -> Image {
    let program = folder.join("skysail-proxy");
    // Small, and linked with the C library as the programs are.
    fs::copy("/bin/true", &program).unwrap();
    let spec = ImageSpec {
        program,
        name: "localhost/skysail-proxy:1".into(),
        description: "A program".into(),
        version: "1".into(),
    };
    Image::new(&spec).unwrap()
}

/// Returns the headers and contents of an archive's files and folders.
fn unpack(archive: &[u8]) -> BTreeMap<String, (tar::Header, Vec<u8>)> {
    let mut unpacked = BTreeMap::new();
    for entry in tar::Archive::new(archive).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        let path = entry.path().unwrap().to_str().unwrap().to_owned();
        unpacked.insert(path, (entry.header().clone(), content));
    }
    unpacked
}

fn json_of(files: &BTreeMap<String, (tar::Header, Vec<u8>)>, path: &str) -> Value {
    serde_json::from_slice(&files[path].1).unwrap()
}

/// Returns the path of the blob of a descriptor, after a check of its digest and length.
fn blob(files: &BTreeMap<String, (tar::Header, Vec<u8>)>, descriptor: &Value) -> String {
    let digest = descriptor["digest"].as_str().unwrap();
    let path = format!("blobs/{}", digest.replace(':', "/"));
    let content = &files[&path].1;
    assert_eq!((sha256(content).as_str(), Some(content.len() as u64)), (digest, descriptor["size"].as_u64()));
    path
}

#[test]
fn the_same_program_gives_the_same_bytes() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = image(one.path());
    let program = one.path().join("skysail-proxy");
    let later = SystemTime::now() + Duration::from_secs(86_400);
    fs::File::options().write(true).open(&program).unwrap().set_modified(later).unwrap();
    assert_eq!(first.archive, image(other.path()).archive);
    assert_eq!(
        first.archive,
        Image::new(&ImageSpec {
            program,
            name: "localhost/skysail-proxy:1".into(),
            description: "A program".into(),
            version: "1".into(),
        })
        .unwrap()
        .archive
    );
}

#[test]
fn an_archive_is_an_oci_image_layout() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(folder.path());
    let files = unpack(&image.archive);
    assert_eq!(json_of(&files, "oci-layout"), json!({ "imageLayoutVersion": "1.0.0" }));
    let descriptor = &json_of(&files, "index.json")["manifests"][0];
    assert_eq!(descriptor["annotations"]["io.containerd.image.name"], "localhost/skysail-proxy:1");
    assert_eq!(descriptor["digest"], *image.digest);
    let manifest = json_of(&files, &blob(&files, descriptor));
    let config = json_of(&files, &blob(&files, &manifest["config"]));
    assert_eq!(config["config"]["Entrypoint"], json!(["/usr/local/bin/skysail-proxy"]));
    assert_eq!(config["config"]["User"], "1337:1337");
    assert_eq!(config["config"]["Labels"]["org.opencontainers.image.licenses"], "Apache-2.0");
    let layer = blob(&files, &manifest["layers"][0]);
    let docker = &json_of(&files, "manifest.json")[0];
    assert_eq!(docker["Layers"], json!([layer]));
    assert_eq!(docker["RepoTags"], json!(["localhost/skysail-proxy:1"]));
    let mut content = Vec::new();
    flate2::read::GzDecoder::new(&*files[&layer].1).read_to_end(&mut content).unwrap();
    assert_eq!(config["rootfs"]["diff_ids"], json!([sha256(&content)]));
    let root = unpack(&content);
    let modes: BTreeMap<&str, u32> =
        root.iter().map(|(path, (header, _))| (path.as_str(), header.mode().unwrap())).collect();
    assert_eq!(
        (modes["usr/local/bin/skysail-proxy"], modes["tmp/"], modes["etc/passwd"]),
        (0o755, 0o1777, 0o644)
    );
    for (path, (header, _)) in &root {
        assert_eq!(
            (header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()),
            (0, 0, 0),
            "{path}"
        );
    }
    let users = String::from_utf8_lossy(&root["etc/passwd"].1);
    assert!(users.contains("istio-proxy:x:1337:1337:istio-proxy:/:/sbin/nologin\n"), "{users}");
    let listed: Vec<&str> = image.files.iter().map(String::as_str).collect();
    let is_library = |path: &&str| path.starts_with("lib");
    assert!(listed.iter().any(|path| path.ends_with("/libc.so.6")), "{listed:?}");
    assert!(listed.iter().any(|path| path.contains("/ld-linux")), "{listed:?}");
    let others: Vec<&str> =
        listed.into_iter().filter(|path| !is_library(path) && *path != AUTHORITIES).collect();
    assert_eq!(others, ["etc/group", "etc/nsswitch.conf", "etc/passwd", "usr/local/bin/skysail-proxy"]);
}

#[test]
fn other_files_than_programs_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("skysaild");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    let spec = ImageSpec { program, name: "a:1".into(), description: String::new(), version: String::new() };
    let error = Image::new(&spec).unwrap_err();
    assert!(format!("{error:#}").contains("is no 64-bit Linux program"), "{error:#}");
}
