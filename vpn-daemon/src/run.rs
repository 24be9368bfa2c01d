//! The two verbs, from the command line to the exit code.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use codervpn_host::Paths;
use codervpn_host::cleanup;
use codervpn_host::lock::InstanceLock;
use codervpn_host::privilege;
use tokio_util::sync::CancellationToken;

use crate::args::{CleanupArgs, Cli, ServeArgs, Verb};
use crate::config::Config;
use crate::ipc::Listener;
use crate::parameters::Device;
use crate::signals::{self, Reload};
use crate::{daemon, logging, supervisor};

/// Threads of the async runtime. What is heavy runs in the data thread.
const WORKERS: usize = 2;

/// How long threads that hang in a system call may hold up the end.
const THREADS_LIMIT: std::time::Duration = std::time::Duration::from_millis(200);

/// Runs the program; every error becomes one line on stderr and exit code 1.
pub fn run(cli: Cli) -> ExitCode {
    let result = match cli.verb {
        Verb::Serve(args) => serve(args),
        Verb::Cleanup(args) => clean_up(args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            say(&mut std::io::stderr(), &format!("codervpnd: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Nobody is left to tell when a stream is closed.
fn say(stream: &mut dyn std::io::Write, text: &str) {
    let _ = writeln!(stream, "{text}");
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    // Before any thread exists: it holds for the threads that this one starts.
    privilege::harden_process().context("cannot protect the process")?;
    let ServeArgs { config: file, settings } = args;
    let flags = settings.flags();
    let config = Config::load(file.as_deref(), &flags)?;
    let level = logging::init(&config.daemon.log)?;
    let paths = Paths::new(&config.daemon.state_dir, &config.daemon.runtime_dir);
    restore_on_panic(paths.clone());
    if !privilege::has_net_admin() {
        anyhow::bail!("not permitted to configure the network: run codervpnd as root, or with CAP_NET_ADMIN");
    }
    let lock = InstanceLock::acquire(&paths)?;
    // Before the first look-up: a dead daemon may have left a resolver that answers nothing (dns-and-os 2.6).
    report(&cleanup::undo_leftovers(&paths));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .thread_name("runtime")
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let served = runtime.block_on(async move {
        let reload = Reload { file, flags, config: Arc::new(ArcSwap::from_pointee(config)), level };
        serve_until_told(reload, paths).await
    });
    // A look-up that the machine's resolver does not answer holds its thread for many seconds; nobody waits for it.
    runtime.shutdown_timeout(THREADS_LIMIT);
    served?;
    drop(lock);
    Ok(ExitCode::SUCCESS)
}

async fn serve_until_told(reload: Reload, paths: Paths) -> anyhow::Result<()> {
    let listener = Listener::open(&reload.config.load()).await?;
    let shutdown = CancellationToken::new();
    let device = Device::from_machine_id(&std::fs::read_to_string("/etc/machine-id").unwrap_or_default());
    let config = reload.config.clone();
    // The clients are served until the tunnel is down, so that they see it go.
    let down = CancellationToken::new();
    let (handle, life) = daemon::spawn(config.clone(), paths.clone(), device, shutdown.clone());
    signals::spawn(reload, paths, handle.clone(), shutdown.clone())?;
    let socket = config.load().socket.path.clone();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), socket = %socket.display(), "ready");
    let supervised = tokio::spawn(supervisor::report(handle.clone(), down.clone()));
    let clients = tokio::spawn(listener.serve(config, handle, down.clone()));
    life.await.context("the daemon's task failed")?;
    down.cancel();
    clients.await.context("the task of the clients failed")?;
    supervised.await.context("the supervisor's task failed")?;
    tracing::info!("ended");
    Ok(())
}

fn clean_up(args: CleanupArgs) -> anyhow::Result<ExitCode> {
    let config = Config::load(args.config.as_deref(), &args.settings.flags())?;
    let paths = Paths::new(&config.daemon.state_dir, &config.daemon.runtime_dir);
    let report = cleanup::cleanup(&paths, Some(&config.socket.path), args.force)?;
    for done in &report.done {
        say(&mut std::io::stdout(), done);
    }
    for failed in &report.failed {
        say(&mut std::io::stderr(), &format!("codervpnd: {failed}"));
    }
    Ok(if report.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report(report: &cleanup::Report) {
    for done in &report.done {
        tracing::warn!("left by a daemon that died: {done}");
    }
    for failed in &report.failed {
        tracing::error!("{failed}");
    }
}

/// The machine must not be left without names, whatever is wrong with us (dns-and-os 7.5).
fn restore_on_panic(paths: Paths) {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        default(panic);
        report(&cleanup::restore_while_aborting(&paths));
    }));
}
