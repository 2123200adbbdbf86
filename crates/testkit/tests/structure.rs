//! The shape of the code: the modules of a crate form no cycle, its types have different names, no file is long, and
//! configuration holds no mutable state.
//!
//! Modules are those on the top level of a crate, and those of the folders in [`FOLDERS`]. A module uses another one if
//! its code has a path that begins with `crate::` (and the folder) and the other's name. Unit tests do not count.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The folder of all crates.
const CRATES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// Maximum number of lines of a file without its unit tests.
const MAX_LINES: usize = 600;
/// The words by which a root module says that its modules are listed from top to bottom.
const IS_ORDERED: &str = "listed from top to bottom";

/// Parts of the names of types that hold mutable state: atomics, locks, cells, channels.
const MUTABLE: &[&str] = &[
    "Atomic",
    "Mutex",
    "RwLock",
    "Cell<",
    "OnceCell",
    "OnceLock",
    "LazyLock",
    "ArcSwap",
    "Sender",
    "Receiver",
    "Semaphore",
    "Notify",
];

/// Folders of crates whose own modules form no cycle either.
const FOLDERS: [(&str, &str); 1] = [("proxy", "request")];

/// By module, the modules that it uses, each with a file in which it does.
type Uses = BTreeMap<String, BTreeMap<String, PathBuf>>;

#[test]
fn modules_form_no_cycle() {
    let cycles: Vec<_> = crates().iter().flat_map(|folder| cycles(&uses(folder))).collect();
    assert!(cycles.is_empty(), "modules use each other: {cycles:#?}");
}

#[test]
fn modules_of_folders_form_no_cycle() {
    for (krate, folder) in FOLDERS {
        let source = Path::new(CRATES).join(krate).join("src").join(folder);
        let root = fs::read_to_string(source.join("mod.rs")).unwrap();
        let uses = uses_in(&source, &root, &["crate", folder]);
        assert!(uses.values().any(|used| !used.is_empty()), "no module of {folder} uses another one");
        let cycles = cycles(&uses);
        assert!(cycles.is_empty(), "modules of {folder} use each other: {cycles:#?}");
    }
}

#[test]
fn ordered_modules_use_those_below_them() {
    let (mut ordered, mut upward) = (0, Vec::new());
    for folder in crates() {
        let Some(root) = root(&folder).filter(|root| root.contains(IS_ORDERED)) else { continue };
        ordered += 1;
        let listed: Vec<&str> = root.lines().filter_map(module).collect();
        let place = |name: &str| listed.iter().position(|listed| *listed == name);
        for (from, used) in uses(&folder) {
            for (to, file) in used {
                if place(&to).zip(place(&from)).is_some_and(|(to, from)| to < from) {
                    upward.push(format!("{}: {from} uses {to}, which is listed above it", file.display()));
                }
            }
        }
    }
    assert!(ordered > 0, "no root module says that its modules are {IS_ORDERED}");
    assert!(upward.is_empty(), "modules use modules above them: {upward:#?}");
}

#[test]
fn files_are_short() {
    let files = crates().into_iter().flat_map(|folder| files(&folder.join("src")));
    let long: Vec<_> = files
        .map(|file| (code(&fs::read_to_string(&file).unwrap()).lines().count(), file))
        .filter(|(lines, _)| *lines > MAX_LINES)
        .collect();
    assert!(long.is_empty(), "files have more than {MAX_LINES} lines: {long:#?}");
}

#[test]
fn types_of_a_crate_have_different_names() {
    let mut shared = Vec::new();
    for folder in crates() {
        let mut types: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for file in files(&folder.join("src")).into_iter().filter(|file| !is_test(file)) {
            let text = fs::read_to_string(&file).unwrap();
            for (index, line) in code(&text).lines().enumerate() {
                let Some(name) = type_name(line) else { continue };
                types.entry(name).or_default().push(format!("{}:{}", file.display(), index + 1));
            }
        }
        shared.extend(types.into_iter().filter(|(_, places)| places.len() > 1));
    }
    assert!(shared.is_empty(), "types of a crate share a name: {shared:#?}");
}

/// The proxy's configuration is immutable; the state that workers share is in `policy::state`.
#[test]
fn configuration_holds_no_mutable_state() {
    let folder = PathBuf::from(CRATES).join("policy/src/config");
    let mut found = Vec::new();
    for file in files(&folder) {
        let text = fs::read_to_string(&file).unwrap();
        for line in code(&text).lines().map(|line| line.split("//").next().unwrap_or_default()) {
            found.extend(
                MUTABLE.iter().filter(|kind| line.contains(**kind)).map(|kind| (*kind, file.clone())),
            );
        }
    }
    assert!(found.is_empty(), "the configuration holds mutable state; move it to policy::state: {found:#?}");
}

#[test]
fn paths_are_found_in_groups() {
    let text =
        "use crate::{\n    a::{b, c::D},\n    e,\n    f::g,\n};\nlet x = crate::h::I;\nuse crate::a::j;\n";
    assert_eq!(paths(text, &["crate"]), ["a", "e", "f", "h", "a"]);
    assert_eq!(paths(text, &["crate", "a"]), ["b", "c", "j"]);
    assert_eq!(module("pub(crate) mod accept;"), Some("accept"));
    assert_eq!(type_name("    pub(in crate::a) struct B<'a> {").as_deref(), Some("B"));
    assert_eq!(type_name("type A = u8;").as_deref(), Some("A"));
    assert_eq!(type_name("    type Item = u8;"), None);
    assert_eq!(type_name("// struct A"), None);
}

fn crates() -> Vec<PathBuf> {
    let folders = fs::read_dir(CRATES).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = folders.filter(|folder| folder.join("src").is_dir()).collect();
    assert!(found.len() > 10, "{found:?}");
    found
}

/// Returns the text of a crate's root module.
fn root(folder: &Path) -> Option<String> {
    ["src/lib.rs", "src/main.rs"].iter().find_map(|file| fs::read_to_string(folder.join(file)).ok())
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    found.filter(|file| file.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the name of the module that a line of a root module declares.
fn module(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub(crate) ").or(line.strip_prefix("pub ")).unwrap_or(line);
    line.strip_prefix("mod ")?.strip_suffix(';')
}

/// Returns the name of the type that a line declares. Associated types do not count.
fn type_name(line: &str) -> Option<String> {
    let declared = match line.trim_start().strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => line.trim_start(),
    };
    let (keyword, rest) = declared.split_once(' ')?;
    let is_item = match keyword {
        "struct" | "enum" | "trait" | "union" => true,
        "type" => !line.starts_with(' '),
        _ => false,
    };
    is_item.then(|| name(rest)).filter(|name| !name.is_empty())
}

/// Returns whether a file below a folder `src` holds unit tests alone.
fn is_test(file: &Path) -> bool {
    file.components()
        .rev()
        .take_while(|part| part.as_os_str() != "src")
        .any(|part| Path::new(part.as_os_str()).file_stem().is_some_and(|stem| stem == "tests"))
}

/// Returns a file's text without its unit tests.
fn code(text: &str) -> &str {
    text.split_once("#[cfg(test)]\nmod tests {").map_or(text, |(code, _)| code)
}

/// Returns the uses that are part of a cycle, with the way back.
fn cycles(uses: &Uses) -> Vec<String> {
    let mut cycles = Vec::new();
    for (from, used) in uses {
        for (to, file) in used {
            let Some(back) = path_between(uses, to, from) else { continue };
            cycles.push(format!("{}: {from} uses {to}; {}", file.display(), back.join(" uses ")));
        }
    }
    cycles
}

/// Returns the uses of the modules on the top level of a crate.
fn uses(folder: &Path) -> Uses {
    uses_in(&folder.join("src"), &root(folder).unwrap_or_default(), &["crate"])
}

/// Returns the uses of the modules that `root` declares, whose files are in `source` and whose paths begin with
/// `prefix`.
fn uses_in(source: &Path, root: &str, prefix: &[&str]) -> Uses {
    let modules: BTreeSet<String> = root.lines().filter_map(module).map(str::to_owned).collect();
    let mut uses = Uses::new();
    for file in files(source) {
        let inner = file.strip_prefix(source).unwrap();
        let first = Path::new(inner.components().next().unwrap().as_os_str());
        let name = first.file_stem().unwrap().to_str().unwrap().to_owned();
        if is_test(&file) || !modules.contains(&name) {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let lines = code(&text).lines().map(|line| line.split("//").next().unwrap_or_default());
        let used = paths(&lines.collect::<Vec<_>>().join("\n"), prefix).into_iter();
        let used = used.filter(|used| *used != name && modules.contains(used));
        uses.entry(name.clone()).or_default().extend(used.map(|used| (used, file.clone())));
    }
    uses
}

/// Returns the names that follow a prefix in the paths of a text, also of paths in braces.
fn paths(text: &str, prefix: &[&str]) -> Vec<String> {
    let [first, inner @ ..] = prefix else { return Vec::new() };
    let start = format!("{first}::");
    let starts = text.match_indices(&start).map(|(at, start)| &text[at + start.len()..]);
    inner
        .iter()
        .fold(starts.flat_map(items).collect(), |found: Vec<&str>, part| {
            let rests = found.into_iter().filter(|item| name(item) == *part);
            rests.filter_map(|item| item[part.len()..].strip_prefix("::")).flat_map(items).collect()
        })
        .into_iter()
        .map(name)
        .collect()
}

/// Returns the rest of a text from the beginning of each item: those of a group in braces, or the one item.
fn items(text: &str) -> Vec<&str> {
    let Some(group) = text.strip_prefix('{') else { return vec![text] };
    let (mut found, mut depth, mut begins) = (Vec::new(), 0, true);
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => begins = true,
            _ if begins && !character.is_whitespace() => {
                found.push(&group[at..]);
                begins = false;
            }
            _ => {}
        }
    }
    found
}

fn name(text: &str) -> String {
    text.chars().take_while(|character| character.is_alphanumeric() || *character == '_').collect()
}

/// Returns the modules on a path of uses from one module to another, both included.
fn path_between(uses: &Uses, from: &str, to: &str) -> Option<Vec<String>> {
    let mut reached = BTreeMap::from([(from.to_owned(), None::<String>)]);
    let mut next = vec![from.to_owned()];
    while let Some(module) = next.pop() {
        if module == to {
            let mut path = vec![module];
            while let Some(Some(before)) = reached.get(&path[path.len() - 1]) {
                path.push(before.clone());
            }
            path.reverse();
            return Some(path);
        }
        for used in uses.get(&module).into_iter().flat_map(|used| used.keys()) {
            if !reached.contains_key(used) {
                reached.insert(used.clone(), Some(module.clone()));
                next.push(used.clone());
            }
        }
    }
    None
}
