// Workers for pages that are opened from a folder, where browsers start none: the script runs in a hidden frame instead.
// The search of the site asks for one. The name of this file is the one by which the theme knows that it need not load its own.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this._inside = new Promise((loaded) => {
        frame.onload = () => loaded(frame.contentWindow)
        document.documentElement.append(frame)
      }).then((inside) => {
        const load = (src) =>
          new Promise((onload, onerror) => {
            const script = Object.assign(inside.document.createElement("script"), { src, onload, onerror })
            inside.document.head.append(script)
          })
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve())
        return load(url).then(() => inside)
      })
    }

    postMessage(data) {
      this._inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
