package exportablecache.sample

import android.app.Activity
import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.io.File

/** A prompt, its streamed continuation, and a button that stops it. */
class MainActivity : Activity() {
    private lateinit var answers: Answers

    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        val prompt = EditText(this).apply { hint = "Prompt" }
        val answer = TextView(this).apply { setTextIsSelectable(true) }
        val ask = Button(this).apply { text = "Ask" }
        val stop = Button(this).apply { text = "Stop" }
        val column = LinearLayout(this).apply { orientation = LinearLayout.VERTICAL }
        column.fitsSystemWindows = true
        for (view in listOf(prompt, ask, stop, ScrollView(this).apply { addView(answer) })) column.addView(view)
        setContentView(column)

        fun write(said: String) = runOnUiThread { answer.append(said) }
        answers = Answers(File(getExternalFilesDir(null), "bundle").path) { write("\n$it") }
        ask.setOnClickListener {
            answer.text = ""
            answers.ask(prompt.text.toString(), ::write) { write("\n[${it.generatedTokens} tokens, ended by ${it.stop}]") }
        }
        stop.setOnClickListener { answers.stop() }
    }

    override fun onDestroy() {
        answers.close()
        super.onDestroy()
    }
}
